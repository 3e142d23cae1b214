"""Families of models that people serve, and what a small model of each is made of."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.engine.support.refused import MODELS, SMALL


@dataclass(frozen=True)
class Family:
    """A kind of model that people serve.

    Attributes:
        model_type: transformers' name for it.
        known_as: models that people know.
        settings: of the configuration, besides those of :func:`benchmarks.harness.models.make_model`.
        dtype: bfloat16 where vLLM's CPU build knows no other.
        tolerance: of logits, against the masked model.
        reads_images: whether its prompts have images.
        architecture: vLLM's name for it, if no small model of it is made, only a configuration: it is refused.
    """

    model_type: str
    known_as: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    tolerance: float = 1e-4
    reads_images: bool = False
    architecture: str | None = None


FAMILIES = [
    *(Family(**fields) for fields in yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())),
    Family("gemma3", "Gemma 3 with images", {"text_config": {**SMALL, "model_type": "gemma3_text"}},
           architecture="Gemma3ForConditionalGeneration"),
    *(
        Family(MODELS[refused][0], known_as, MODELS[refused][2], architecture=MODELS[refused][1])
        for refused, known_as in (
            ("MLA", "DeepSeek V2, V3, R1; Kimi K2"),
            ("chunked attention", "Llama 4"),
            ("ALiBi", "BLOOM"),
            ("without full attention", "Mamba"),
            ("pooling", "BERT"),
        )
    ),
]  # fmt: skip
