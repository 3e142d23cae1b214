"""The small trained model that quality is measured with, and how it was trained."""

from pathlib import Path

NEEDLE = Path(__file__).parent / "needle"
"""The trained model: configuration, tokenizer, weights."""
