"""Configurations of models, without weights, that eviction refuses, for the tests of the refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
NO_GQA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
MODELS = {
    "MLA": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        NO_GQA | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    ),
    "without full attention": ("mamba", "MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2}),
    "sliding-window": ("mistral", "MistralForCausalLM", SMALL | {"sliding_window": 128}),
    "without full attention (by its layer types)": (
        "gemma2",
        "Gemma2ForCausalLM",
        SMALL | {"layer_types": ["sliding_attention"] * 2},
    ),
    "chunked attention": ("llama4_text", "Llama4ForCausalLM", SMALL | {"attention_chunk_size": 128}),
    "attention other than full, sliding-window or linear": (
        "llama",
        "LlamaForCausalLM",
        SMALL | {"layer_types": ["full_attention", "indexed_attention"]},
    ),
    "encoder-decoder": (
        "whisper",
        "WhisperForConditionalGeneration",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4},
    ),
    "pooling": ("bert", "BertModel", NO_GQA),
    "ALiBi": ("bloom", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "ALiBi (switched on)": ("falcon", "FalconForCausalLM", NO_GQA | {"alibi": True}),
    "share KV": ("llama", "LlamaForCausalLM", SMALL | {"num_kv_shared_layers": 1}),
    "skip attention": ("llama", "DeciLMForCausalLM", SMALL),
    "have different heads": (
        "llama",
        "LlamaForCausalLM",
        SMALL | {"per_layer_config": {1: {"num_key_value_heads": 4}}},
    ),
}  # fmt: skip
"""By what the refusal says of them: the type of model, its architecture, its settings."""

WINDOWED = ("gemma2", "Gemma2ForCausalLM", SMALL)
"""A layer with a window, then one without."""

GEMMA3 = (
    "gemma3",
    "Gemma3ForConditionalGeneration",
    {
        "text_config": SMALL
        | {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
)
"""Its images are attended to in both directions."""

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel"},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}

FP8_KV = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []},
    },
}


def save_config(folder: Path, model_type: str, architecture: str, settings: Mapping[str, Any]) -> str:
    """Write a configuration; its folder."""
    config = AutoConfig.for_model(model_type, **settings)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)
