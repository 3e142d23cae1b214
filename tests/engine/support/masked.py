"""The model as Hugging Face defines it, in fp32: what its attention sees, and what it says without evicted entries."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm import EngineArgs
from vllm.config import set_current_vllm_config

from tests.engine.support.running import CLOSE, Answer, Ask
from vllm_kvevict.policies import LayerInputs, Rotary
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

WIDER = {"cohere2": 1}
"""Models whose windows have more tokens in vLLM than in Hugging Face's code, as they were trained."""
INTERLEAVED = ("glm4",)
"""Models whose rotary embedding turns neighbouring dimensions together."""
SINKS = 4
"""First tokens that rows which repeat a chunk see besides."""

Kept = Mapping[int, Sequence[Sequence[int]]]
"""By layer that is evicted, for each KV head the positions that stay."""
Events = Sequence[tuple[int, Kept]]
"""Evictions in their order: after how many tokens, and what stays of them."""


def masked_logits(
    model: Path,
    prompt: list[int],
    generated: list[int],
    events: Events = (),
    *,
    dtype: torch.dtype = torch.float32,
    seen: torch.Tensor | None = None,
    images: Mapping[str, torch.Tensor] | None = None,
    stored: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    watch: Callable[[int, torch.Tensor, torch.Tensor, float, torch.Tensor], Any] | None = None,
) -> torch.Tensor:
    """Logits from which each generated token was chosen, [generated, vocabulary].

    Args:
        events: evictions; the rows behind each see only what it keeps.
        seen: bool [tokens, tokens], what each row may see where it sees no window; None: whatever is not behind it.
        images: what a model that reads images is given beside the prompt's tokens.
        stored: makes of a layer's keys and values what is stored of them; None: they are stored as they are.
        watch: is given the queries, keys ([heads, tokens, d]), scale and values of each layer that is evicted.
    """
    layers = evicted_layers(model)

    def attention(
        module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, s_aux=None, **_
    ):
        group = query.shape[1] // key.shape[1]
        n = query.shape[2]
        visible = torch.ones(key.shape[1], n, n, dtype=torch.bool).tril()
        if seen is not None and sliding_window is None:
            visible &= seen
        if sliding_window is not None:
            width = sliding_window + WIDER.get(module.config.model_type, 0)
            visible &= torch.ones(n, n, dtype=torch.bool).triu(1 - width)
        evicted = layers.index(module.layer_idx) if module.layer_idx in layers else None
        if stored is not None:
            key, value = stored(key, value)
        if watch is not None and evicted is not None:
            watch(evicted, query[0], key[0], scaling, value[0])
        for position, stays in events:
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
    network = _network(model, dtype, with_images=images is not None)
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + generated]), use_cache=False, **(images or {})).logits[0]
    return logits[len(prompt) - 1 : -1].float()


@functools.lru_cache(maxsize=4)
def _network(model: Path, dtype: torch.dtype, with_images: bool) -> torch.nn.Module:
    """The model, in whose text attention is masked; encoders of images see all of them."""
    # vLLM serves some models by Hugging Face's own classes, and changes these for the whole process.
    config = EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        if not with_images:
            return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="masked")
        attention = {"text_config": "masked", "vision_config": "eager"}
        return AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, attn_implementation=attention)


@functools.cache
def evicted_layers(model: Path) -> list[int]:
    """Numbers of the model's layers that see the whole text."""
    config = AutoConfig.from_pretrained(model).get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind in ("attention", "full_attention", "hybrid")]


def expected_logits(
    model: Path, ask: Ask, answer: Answer, at: Sequence[int] = (), **settings: Any
) -> torch.Tensor:
    """What the plain model says that loses whatever an answer's evictions did not keep.

    Args:
        at: after how many tokens it was evicted each time; without them at most once, in its prompt.
        settings: of :func:`masked_logits`.
    """
    events = list(zip(at or [ask.evicted_to], answer.kept, strict=bool(answer.kept)))
    return masked_logits(model, answer.prompt, answer.tokens, events, **settings)


def check_logits(
    model: Path,
    ask: Ask,
    answer: Answer,
    at: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    stored: Any = None,
    **tolerance: float,
) -> None:
    """An answer's logits are those of the plain model that sees what was kept, and nothing else."""
    expected = expected_logits(model, ask, answer, at, dtype=dtype, stored=stored)
    torch.testing.assert_close(answer.logits, expected, **(tolerance or CLOSE))


def layer_inputs(
    model: Path,
    prompt: list[int],
    prompts: RepeatPrompts,
    begins: int = 0,
    events: Events = (),
    chunk: int | None = None,
    sees: str = "all",
    **settings: Any,
) -> list[LayerInputs]:
    """What policies may read of each layer of a prompt, from a token on, once that was computed and repeated; no
    projections and rotations where the model has other layers, too.

    Args:
        events: evictions of what is before.
        chunk: tokens that are repeated at once; None: all.
        sees: what the rows that repeat a chunk attend to: all, or the chunk, the sinks and themselves.
        settings: of :func:`masked_logits`.
    """
    n, stored = len(prompt), events[-1][1] if events else {}
    tensors: dict[int, tuple[Any, ...]] = {}
    most: dict[int, list[torch.Tensor]] = {}
    for start in range(begins, n, chunk or n):
        part = range(start, min(start + (chunk or n), n))
        rows = prompts.rows(prompt, start, part.stop)
        seen = None
        if sees == "chunk":
            seen = torch.ones(n + len(rows), n + len(rows), dtype=torch.bool)
            seen[n:, :n] = False
            seen[n:, [*range(min(SINKS, start)), *part]] = True
        watch = lambda layer, *of: tensors.update({layer: of})  # noqa: E731
        masked_logits(model, prompt + rows, [], events, seen=seen, watch=watch, **settings)
        for layer, (query, key, scale, _) in tensors.items():
            sinks = (
                [row[:SINKS] for row in stored[layer]] if stored else [range(min(SINKS, start))] * len(key)
            )
            most.setdefault(layer, []).append(_most_attention(query, key, scale, sinks, part, len(rows)))
    network = _network(model, torch.float32, with_images=False)
    is_mixed = len(tensors) < network.config.num_hidden_layers
    rotary = None if is_mixed else _rotary(network, n)
    inputs = []
    for layer, (query, key, scale, value) in sorted(tensors.items()):
        own_query, own_key, own_value = (x[:, begins:n] for x in (query, key, value))
        w_o = None
        if not is_mixed:
            projection = network.model.layers[layer].self_attn.o_proj.weight.detach()
            w_o = projection.T.unflatten(0, (len(query), -1))
        inputs.append(
            LayerInputs(
                own_query,
                own_key,
                own_value,
                scale=scale,
                q_all=own_query,
                w_o=w_o,
                rotary=rotary,
                repeated=torch.cat(most[layer], 1),
                earlier_keys=[key[head, row] for head, row in enumerate(stored[layer])] if stored else None,
                begins=begins,
            )
        )
    return inputs


def _rotary(network: torch.nn.Module, n: int) -> Rotary:
    """How a model turns the keys and queries of its first tokens."""
    with torch.inference_mode():
        tables = network.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])
    # Hugging Face repeats them for the other half of the dimensions.
    cos, sin = (table[0, :, : table.shape[2] // 2] for table in tables)
    return Rotary(cos, sin, network.config.model_type in INTERLEAVED)


def _most_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    sinks: Sequence[Sequence[int]],
    part: Sequence[int],
    rows: int,
) -> torch.Tensor:
    """The most attention that each token of a part receives from the last rows, [KV heads, tokens].

    It is taken over the part, the sinks of each KV head before it, and the rows themselves.
    """
    most, group = [], len(query) // len(key)
    for head, keys in enumerate(key):
        first = len(sinks[head])
        places = torch.tensor([*sinks[head], *part, *range(len(keys) - rows, len(keys))])
        later = torch.ones(rows, len(places), dtype=torch.bool).triu(1 + len(places) - rows)
        logits = query[head * group : (head + 1) * group, -rows:] @ keys[places].T * scale
        attention = logits.masked_fill(later, float("-inf")).softmax(-1)
        most.append(attention[:, :, first : first + len(part)].amax((0, 1)))
    return torch.stack(most)
