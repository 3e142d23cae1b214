"""Configurations of models, without weights, that eviction refuses, for the tests of the refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

_READ = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
SMALL: dict[str, Any] = _READ["small"]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {says: tuple(of) for says, of in _READ["models"].items()}
WINDOWED, GEMMA3 = tuple(_READ["windowed"]), tuple(_READ["gemma3"])
QUANTIZED, FP8_KV = _READ["quantized"], _READ["fp8_kv"]


def save_config(folder: Path, model_type: str, architecture: str, settings: Mapping[str, Any]) -> str:
    """Write a configuration; its folder."""
    config = AutoConfig.for_model(model_type, **settings)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)
