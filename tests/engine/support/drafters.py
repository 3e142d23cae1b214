"""Tiny targets that mostly count, and drafters for each of vLLM's methods that have weights of their own.

Nothing cheap guesses what a random model says. The targets here answer most tokens with the next one, and the others
with what their cache makes of them. Drafters count too, disturbed by their own cache and by the target's hidden states.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness.models import make_model, make_variant

LOUDER = {"gpt_oss": 16.0}
"""By architecture, embeddings over those of the random model: more of them, and the model counts more often."""
GLM: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
}
"""vLLM takes this model only if its last layer and the module for the token after next both have experts."""
EMBEDDINGS, HEAD, OUTPUT = "model.embed_tokens.weight", "lm_head.weight", "self_attn.o_proj.weight"
Weights = dict[str, torch.Tensor]


def load(model: Path) -> Weights:
    """All weights of a model."""
    return load_file(model / "model.safetensors")


def layer(weights: Weights, index: int, name: str, attention: float = 1.0) -> Weights:
    """One layer by another name, with its attention that much louder."""
    found = {
        key.replace(f"model.layers.{index}.", name): weight.clone()
        for key, weight in weights.items()
        if key.startswith(f"model.layers.{index}.")
    }
    found[name + OUTPUT] *= attention
    return found


def counting_target(folder: Path, architecture: str = "llama") -> Path:
    """A model that mostly counts; ``glm4_moe`` drafts for itself by ``mtp``."""
    settings = GLM if architecture == "glm4_moe" else {}
    base = make_model(folder / "random", architecture, **settings)
    weights = load(base)
    weights[EMBEDDINGS] *= LOUDER.get(architecture, 1.0)
    weights[HEAD] = weights[EMBEDDINGS].roll(1, 0)
    if settings:
        size, name = weights[HEAD].shape[1], "model.layers.4."
        weights |= layer(weights, 3, name, attention=3)
        weights |= {
            f"{name}{norm}.weight": torch.ones(size) for norm in ("enorm", "hnorm", "shared_head.norm")
        }
        weights[f"{name}eh_proj.weight"] = 0.02 * torch.cat([torch.eye(size), 0.3 * torch.eye(size)], 1)
        weights[f"{name}embed_tokens.weight"] = weights[EMBEDDINGS].clone()
        weights[f"{name}shared_head.head.weight"] = weights[HEAD].clone()
    return make_variant(folder / "target", base, weights)


def one_layer(path: Path, target: Path) -> Path:
    """For ``draft_model``: the first layer of a target that is a Llama (all of it would always be right)."""
    weights = load(target)
    kept = {name: weight for name, weight in weights.items() if ".layers." not in name}
    kept |= layer(weights, 0, "model.layers.0.", attention=8)
    return make_variant(path, target, kept, num_hidden_layers=1)


def eagle(path: Path) -> Path:
    """For ``eagle``: a layer of a Llama, whose input is the token and a little of the hidden state."""
    base = make_model(path / "random")
    weights = layer(load(base), 0, "layers.0.", attention=200)
    del weights["layers.0.input_layernorm.weight"]  # vLLM has none in a first layer
    size = len(weights["layers.0." + OUTPUT])
    weights["fc.weight"] = torch.cat([torch.eye(size), 0.006 * torch.eye(size)], 1)
    return make_variant(path / "head", base, weights, num_hidden_layers=1)


def eagle3(path: Path) -> Path:
    """For ``eagle3``: a layer of a Llama that finds the token's own entry among those of its cache.

    There the token comes in by attention only. So queries are keys, which match their own best, and values are the
    token's first dimensions, as many as they have.
    """
    base = make_model(path / "random")
    weights, name = layer(load(base), 0, "midlayer."), "midlayer.self_attn."
    size = len(weights["midlayer." + OUTPUT])
    keys = torch.cat([1.5 * weights[f"{name}k_proj.weight"], torch.zeros(size // 2, size)], 1)
    dims = torch.eye(size // 2, 2 * size)
    weights[f"{name}k_proj.weight"], weights[f"{name}v_proj.weight"] = keys, dims
    # Two heads of queries for each of keys, both of which say the same.
    pairs = [matrix.view(2, 32, -1).repeat_interleave(2, 0).view(size, -1) for matrix in (keys, dims)]
    weights[f"{name}q_proj.weight"], weights[f"{name}o_proj.weight"] = (
        pairs[0],
        pairs[1][:, :size].T.contiguous() / 2,
    )
    generator = torch.Generator().manual_seed(0)
    weights["fc.weight"] = torch.randn(size, 3 * size, generator=generator) * 0.1 / size**0.5
    weights |= {"midlayer.hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}
    ids = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3]
    }  # vLLM's own choice repeats layers of so small a target
    return make_variant(
        path / "head", base, weights, num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"], **ids
    )
