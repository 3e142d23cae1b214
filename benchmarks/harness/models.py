"""Small random models on disk, complete with a tokenizer and chat template, so that nothing is downloaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "glm4": {"attention_bias": False},
    "phi3": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        # Positions beyond what the model was trained on, as the real one has them.
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    "gemma2": {
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0,  # low enough to matter to logits this small
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    "olmo3": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "exaone4": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "cohere2": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "rms_norm_eps": None,  # vLLM would take it for another kind of norm
    },
}
"""Models of which only some layers see the whole text; the others see a window."""
LINEAR: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 128,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.17,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
        "num_hidden_layers": 5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 64,
        "attention_head_dim": 32,
    },
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_ssm": 256,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    "qwen3_next": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
"""Models of which only some layers have attention; the others have a state."""
ARCHITECTURES |= LINEAR
WINDOW = 64
ARCHITECTURES |= {name: {"sliding_window": WINDOW, **settings} for name, settings in WINDOWED.items()}


def make_model(  # noqa: PLR0913
    path: Path | str,
    architecture: str = "llama",
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 512,
    max_len: int = 4096,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random model in Hugging Face format, unless the same one is there already.

    Args:
        path: folder to write.
        architecture: a ``model_type`` of transformers; ``ARCHITECTURES`` has further settings of some.
        hidden, layers, heads, kv_heads, head_dim, vocab, max_len: sizes.
        dtype: of the weights.
        seed: of the weights.
        overrides: further entries of the model's configuration.

    Returns:
        The folder.
    """
    path = Path(path)
    settings = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        **ARCHITECTURES.get(architecture, {}),
        **overrides,
    }
    recipe = json.dumps({"architecture": architecture, "dtype": str(dtype), "seed": seed, **settings})
    mark = path / "recipe.json"
    if mark.exists() and mark.read_text() == recipe:
        return path
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    # Wider than the usual initialisation: attention of a random model is else so flat that every token looks alike.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)
            elif name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                weight.normal_(std=0.5)
            elif name.endswith("sinks"):
                weight.normal_()
            elif architecture == "gpt_oss" and "experts" in name and not name.endswith("bias"):
                weight.mul_(4)  # else it says the same of everything
    model.save_pretrained(path)
    make_tokenizer(vocab).save_pretrained(path)
    mark.write_text(recipe)
    return path


def make_variant(path: Path, model: Path, weights: dict[str, torch.Tensor], **overrides: Any) -> Path:
    """Write a model with other weights.

    Args:
        path: folder to write.
        model: one of :func:`make_model`, whose tokenizer and configuration it has.
        weights: by name.
        overrides: further entries of the configuration.

    Returns:
        The folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | overrides))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def make_tokenizer(
    vocab: int, marks: Mapping[str, int] | None = None, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of words ``w6``, ``w7``, ... with white space between them.

    Args:
        vocab: tokens.
        marks: tokens in place of words, each with its id, that are found within words, too.
        chat_template: of chats.
    """
    words = {word: index for index, word in enumerate(SPECIAL)}
    named = {index: mark for mark, index in (marks or {}).items()}
    words |= {named.get(index, f"w{index}"): index for index in range(len(SPECIAL), vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(marks or ()),
        chat_template=chat_template,
    )
