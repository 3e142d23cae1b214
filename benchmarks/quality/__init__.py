"""What eviction costs in quality: a small trained model, tasks, a harness for any endpoint, and its report."""

from pathlib import Path

NEEDLE = Path(__file__).parent / "needle"
"""The trained model: configuration, tokenizer, weights."""
