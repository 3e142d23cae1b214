"""Models made here in place of those that vLLM's tests fetch by name: most tests need a configuration only."""

import json
from pathlib import Path

from transformers import OPTConfig, PreTrainedConfig, Qwen2Config
from transformers.utils import logging

from benchmarks.harness.models import make_model
from tests.engine.support.multimodal import make_multimodal_model


def make_stand_ins(folder: Path) -> Path:
    """Write the models; the file by which vLLM finds them (its `VLLM_MODEL_REDIRECT_PATH`).

    Where tests compute with it, they are as large, or read prompts as long, as the published ones; else they are small.
    """
    logging.disable_progress_bar()
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
    found = {
        "facebook/opt-125m": _configuration(folder / "opt-125m", OPTConfig(), "OPTForCausalLM"),
        "facebook/opt-350m": _configuration(folder / "opt-350m", OPTConfig(**large), "OPTForCausalLM"),
        "Qwen/Qwen1.5-7B": _configuration(folder / "qwen1.5", Qwen2Config(), "Qwen2ForCausalLM"),
        "Qwen/Qwen3-0.6B": make_model(folder / "qwen3", "qwen3", max_len=40960),
        "llava-hf/llava-1.5-7b-hf": make_multimodal_model(folder, "llava"),
        "Qwen/Qwen2.5-VL-3B-Instruct": make_multimodal_model(folder, "qwen2_5_vl"),
    }
    redirections = folder / "redirections.json"
    redirections.write_text(json.dumps({name: str(path) for name, path in found.items()}))
    return redirections


def _configuration(folder: Path, config: PreTrainedConfig, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder
