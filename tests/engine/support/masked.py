"""The model as Hugging Face defines it, in fp32: what its attention sees, and what it says without evicted entries."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm import EngineArgs
from vllm.config import VllmConfig, set_current_vllm_config

from vllm_kvevict.policies import LayerInputs, Rotary
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

WIDER = {"cohere2": 1}
"""Models whose windows have more tokens in vLLM than in Hugging Face's code, as they were trained."""
INTERLEAVED = ("glm4",)
"""Models whose rotary embedding turns neighbouring dimensions together."""


def masked_logits(
    model: Path,
    prompt: list[int],
    generated: list[int],
    kept: dict[int, list[list[int]]],
    evicted_at: int,
    dtype: torch.dtype = torch.float32,
    seen: torch.Tensor | None = None,
    window: int | None = None,
    images: Mapping[str, torch.Tensor] | None = None,
    later: Sequence[tuple[int, dict[int, list[list[int]]]]] = (),
    watch: Callable[[int, torch.Tensor, torch.Tensor, float, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Logits from which each generated token was chosen, [generated, vocabulary].

    Args:
        kept: by layer that is evicted, for each KV head the positions below ``evicted_at`` that later rows may see.
        evicted_at: rows from this position on see kept entries only.
        seen: bool [tokens, tokens], what each row may see besides; None: whatever is not behind it.
        window: of layers that have one, instead of the model's own.
        images: what a model that reads images is given beside the prompt's tokens.
        later: further evictions, each as ``evicted_at`` and ``kept``.
        watch: is given each layer's queries, keys ([heads, tokens, d]), scale and values.
    """
    layers = evicted_layers(model)

    def attention(
        module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, s_aux=None, **_
    ):
        group = query.shape[1] // key.shape[1]
        n = query.shape[2]
        visible = torch.ones(key.shape[1], n, n, dtype=torch.bool).tril()
        if seen is not None:
            visible &= seen
        if sliding_window is not None:
            width = window or sliding_window + WIDER.get(module.config.model_type, 0)
            visible &= torch.ones(n, n, dtype=torch.bool).triu(1 - width)
        evicted = layers.index(module.layer_idx) if module.layer_idx in layers else None
        if watch is not None and evicted is not None:
            watch(evicted, query[0], key[0], scaling, value[0])
        for position, stays in ((evicted_at, kept), *later):
            for head, positions in enumerate(stays.get(evicted, ())):
                gone = torch.ones(position, dtype=torch.bool)
                gone[positions] = False
                visible[head, position:, :position] &= ~gone
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        weights = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            weights = softcap * (weights / softcap).tanh()
        weights = weights.masked_fill(~visible.repeat_interleave(group, dim=0), float("-inf"))
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(1, -1, n, 1).to(weights.dtype)
            weights = torch.cat([weights, sinks], -1)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :n]
        return (weights @ value).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register("masked", attention)
    # vLLM serves some models by Hugging Face's own classes, and changes these for the whole process.
    with set_current_vllm_config(_plain_config(model)):
        network = _network(model, dtype, with_images=images is not None)
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + generated]), use_cache=False, **(images or {})).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def _network(model: Path, dtype: torch.dtype, with_images: bool) -> torch.nn.Module:
    """The model, in whose text attention is masked; encoders of images see all of them."""
    if not with_images:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="masked")
    attention = {"text_config": "masked", "vision_config": "eager"}
    return AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, attn_implementation=attention)


@functools.cache
def _plain_config(model: Path) -> VllmConfig:
    return EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()


def evicted_layers(model: Path) -> list[int]:
    """Numbers of the model's layers that see the whole text."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind in ("attention", "full_attention", "hybrid")]


def layer_inputs(model: Path, prompt: list[int], prompts: RepeatPrompts) -> list[LayerInputs]:
    """What policies may read of each layer when the prompt has been computed, and repeated at once."""
    seen = []

    def attention(module, query, key, value, attention_mask, scaling, **_):
        seen.append((query[0], key[0], value[0], scaling))
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True
        )
        return result.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("watched", attention)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="watched")
    with torch.inference_mode():
        network(torch.tensor([prompt]), use_cache=False)
        tables = network.model.rotary_emb(torch.zeros(1), torch.arange(len(prompt))[None])
    # Hugging Face repeats them for the other half of the dimensions.
    cos, sin = (table[0, :, : table.shape[2] // 2] for table in tables)
    interleaved = network.config.model_type in INTERLEAVED
    again = repeated(model, prompt, lambda *chunk: prompts.rows(prompt, *chunk), len(prompt))
    inputs = []
    for layer, most, (query, key, value, scaling) in zip(network.model.layers, again, seen, strict=True):
        w_o = layer.self_attn.o_proj.weight.T.unflatten(0, (query.shape[0], -1))
        inputs.append(
            LayerInputs(
                query,
                key,
                value,
                scale=scaling,
                q_all=query,
                w_o=w_o.detach(),
                rotary=Rotary(cos, sin, interleaved),
                repeated=most,
            )
        )
    return inputs


def repeated(
    model: Path,
    prompt: list[int],
    rows_of: Callable[[int, int], list[int]],
    chunk: int,
    sees: str = "all",
    sinks: int = 4,
) -> torch.Tensor:
    """The most attention that each token of a prompt receives when it is repeated, fp32 [layers, KV heads, tokens].

    The model reads the prompt and the rows of a chunk at once; from that attention over fewer keys is computed.

    Args:
        rows_of: token ids of the rows that repeat tokens [start, stop).
        chunk: tokens of one.
        sees: what the rows attend to: all, or the chunk, the sinks and themselves.
    """
    n, parts = len(prompt), []
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        rows = rows_of(start, stop)
        ours = torch.zeros(n + len(rows), dtype=torch.bool)
        ours[: min(sinks, start)] = ours[start:stop] = ours[n:] = True
        parts.append(_repeated_chunk(model, prompt + rows, n, ours, sees)[:, :, start:stop])
    return torch.cat(parts, 2)


def _repeated_chunk(model: Path, tokens: list[int], n: int, ours: torch.Tensor, sees: str) -> torch.Tensor:
    """The same of one chunk, for every token of the prompt; `ours` [tokens] are those over which attention is taken."""
    layers = []

    def attention(module, query, key, value, attention_mask, scaling, **_):
        heads, total = key.shape[1], len(tokens)
        key, value = (x.repeat_interleave(query.shape[1] // heads, dim=1) for x in (key, value))
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        narrow = causal.clone()
        narrow[n:] &= ours
        logits = query @ key.transpose(2, 3) * scaling
        narrowed = logits.masked_fill(~narrow, float("-inf")).softmax(-1)
        layers.append(narrowed[0, :, n:, :n].amax(1).unflatten(0, (heads, -1)).amax(1))
        weights = narrowed if sees == "chunk" else logits.masked_fill(~causal, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register("repeating", attention)
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="repeating"
    )
    with torch.inference_mode():
        network(torch.tensor([tokens]), use_cache=False)
    return torch.stack(layers)
