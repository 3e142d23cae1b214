"""take: evict while the prompt is read, chunk by chunk, guided by the prompt's last tokens (TAKE, eq. 3-13).

The prompt is read in chunks of take_chunk tokens. Each chunk but the last comes with probe rows: copies of the
prompt's last take_probe tokens, at their own positions, which attend to the cache, the chunk and each other and are
then forgotten. In the last chunk these tokens are themselves the probe, and stay.

q[hq, r]    = alpha*q + (1-alpha)*(query of probe row r in this chunk), starting with the first chunk's; after RoPE
a[hq, r, i] = softmax over the stored entries i of q[hq, r] . k_i * scale; the probe's own keys are left out
s[h, i]     = mean of a over the rows and the query heads of KV head h, average-pooled over the stored order

At the end of a chunk each KV head keeps its B best entries; after the last chunk the probe and the best B - probe
others. The first W = take_warmup_layers layers do not choose: head by head they keep what layer W-1 chose, and
until the last chunk take_warmup_budget entries, if that is more than B. So no layer ever stores more than that and a
chunk.

With take_guide="chunk" there are no probe rows and nothing is averaged: the last tokens of each chunk choose, and
compete like all others unless the chunk is the last one. It shows what the probe is worth.

The paper leaves open what probe rows attend to and where they stand, how the last chunk ends, and the defaults of
take_probe, take_warmup_budget (a quarter of the prompt, at most 10240) and the pooling width.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attention import pool, reduce_group, window_attention, window_queries
from .config import EvictionConfig
from .heads import past_scores, select_uniform, with_window
from .inputs import Q_WINDOW
from .layer import Comm, Kept, LayerInputs, LayerScores
from .params import GQA, choice, integer, kernel_width, or_auto, server_only, unit_interval
from .registry import Policy, register
from .select import best_positions, order_keys

PARAMETERS = (
    server_only(integer("take_chunk", 4096, 1)),
    server_only(integer("take_probe", 32, 1)),
    server_only(unit_interval("take_alpha", 0.2)),
    server_only(or_auto(integer("take_warmup_layers", 0, 0))),
    server_only(or_auto(integer("take_warmup_budget", 1, 1))),
    server_only(choice("take_guide", "prompt", "chunk")),
    kernel_width(5),
    GQA,
)

MAX_WARMUP_BUDGET = 10240
"""Of take_warmup_budget="auto", the paper's value at 128k."""


def chunks(n: int, size: int, probe: int) -> list[tuple[int, int]]:
    """The chunks [start, stop) of a prompt of n tokens: `size` tokens each, the last one what is left.

    The last chunk holds all `probe` final tokens, for which the one before it may be shorter. Raises ValueError
    unless 1 <= probe <= size and n >= 1.
    """
    if not 1 <= probe <= size or n < 1:
        raise ValueError(f"chunks need n >= 1 and 1 <= probe <= size, not n={n}, size={size}, probe={probe}")
    stops = [min(stop, n - probe) for stop in range(size, n, size)]
    return list(pairwise([0, *stops, n]))


def prompt_chunks(cfg: EvictionConfig, n: int) -> list[tuple[int, int]]:
    """The chunks in which a prompt of n tokens is read under `cfg`."""
    return chunks(n, cfg.params["take_chunk"], cfg.window_for(n))


def ema(acc: Tensor | None, q: Tensor, alpha: float) -> Tensor:
    """The probe's queries averaged over chunks, fp32: alpha*acc + (1-alpha)*q, or a copy of q for the first (eq. 9)."""
    # A view would keep all of what q is a part of.
    return q.to(torch.float32, copy=True) if acc is None else acc * alpha + q.float() * (1 - alpha)


def warmup_layers(cfg: EvictionConfig, num_layers: int) -> int:
    """W: how many of the lowest layers follow layer W-1. Raises ValueError if the model has fewer layers."""
    given = cfg.params["take_warmup_layers"]
    if given == "auto":
        return num_layers // 2
    if given > num_layers:
        raise ValueError(
            f"take_warmup_layers must be at most {num_layers}, the model's number of layers, not {given}"
        )
    return int(given)


def chunk_budget(cfg: EvictionConfig, n: int, layer: int, num_layers: int, last: bool) -> int:
    """Entries per KV head that a layer keeps at the end of a chunk of a prompt of n tokens."""
    budget = cfg.budget_for(n)
    if last or layer >= warmup_layers(cfg, num_layers):
        return budget
    relaxed = cfg.params["take_warmup_budget"]
    return max(budget, min(MAX_WARMUP_BUDGET, n // 4) if relaxed == "auto" else relaxed)


def select(
    cfg: EvictionConfig,
    q_acc: Tensor,
    keys_stored: Tensor,
    layer: int,
    num_layers: int,
    last: bool,
    *,
    n: int | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    comm: Comm | None = None,
) -> list[Tensor]:
    """What each KV head of a layer keeps at the end of a chunk.

    Args:
        q_acc: [Hq, p, d], the probe's averaged queries (see `ema`). Where the budget is a ratio so small that the probe
            shrinks (`EvictionConfig.window_for`), the last rows count.
        keys_stored: [Hkv, c, d], all entries of the layer without the probe rows' own, in stored order. In the
            last chunk the p final ones are the probe's tokens.
        layer, num_layers: of the whole model. Layers below W-1 are not asked: they take layer W-1's answer.
        last: whether this is the last chunk.
        n: tokens of the whole prompt, for budgets that depend on it; None: as many as are stored.
        scale, logit_softcap: of the attention logits, as in `LayerInputs`.
        comm: the tensor-parallel group; where KV heads are replicated this is a collective.

    Returns:
        For each KV head int64 indices into the stored order, strictly ascending.

    Raises:
        ValueError: naming the tensor that has a wrong shape.
    """
    inputs = LayerInputs(q_acc, keys_stored, scale=scale, logit_softcap=logit_softcap)
    inputs.check()
    stored = inputs.num_tokens
    total = stored if n is None else n
    keep = chunk_budget(cfg, total, layer, num_layers, last)
    if stored <= keep:
        return list(torch.arange(stored, device=keys_stored.device).repeat(inputs.num_kv_heads, 1).unbind(0))
    rows = min(q_acc.shape[1], cfg.window_for(total))  # a small ratio shrinks the probe
    probe = rows if last else 0
    with torch.no_grad():
        scores = _scores(cfg, inputs, rows, stored - probe, comm)
        best = best_positions(order_keys(scores), [keep - probe] * len(scores))
    return with_window(best, stored, probe)


def _scores(cfg: EvictionConfig, inputs: LayerInputs, probe: int, m: int, comm: Comm | None) -> Tensor:
    """Scores of the first m entries, fp32 [Hkv, m]."""
    grouped = window_queries(inputs, probe)
    buffer = grouped.new_empty(grouped.shape[1], probe, m)
    scores = []
    for query, keys in zip(grouped, inputs.keys, strict=True):
        rows = window_attention(query, keys[:m], inputs.logit_softcap, buffer, causal=False)
        scores.append(reduce_group(rows.mean(1), cfg.params["gqa"], comm))
    return pool(torch.stack(scores), "avg", cfg.params["kernel"])


# A whole prompt in one chunk, for `score_layer` and `select` of any policy.


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Attention of the last tokens to those before them."""
    n, probe = inputs.num_tokens, cfg.window_for(inputs.num_tokens)
    scores = _scores(cfg, inputs, probe, n - probe, comm)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


def select_prompt(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The probe and the best others of each head; below layer W-1 those of layer W-1, which must be given."""
    probe = cfg.window_for(n)
    leader = warmup_layers(cfg, layers[0].num_layers) - 1
    by_layer = {x.layer: x for x in layers}
    kept = []
    for x in layers:
        past_scores(x, n - probe)
        chooser = by_layer.get(max(x.layer, leader))
        if chooser is None:
            raise ValueError(f"layer {x.layer} keeps what layer {leader} chooses, which is not given")
        kept += select_uniform([chooser], [cfg.budget_for(n) - probe], n, probe)
    return kept


def _check(params: Mapping[str, Any]) -> None:
    if params["take_probe"] > params["take_chunk"]:
        raise ValueError(
            f"take_probe must be at most take_chunk, but they are {params['take_probe']} and {params['take_chunk']}"
        )


register(
    Policy(
        "take",
        "chunk by chunk during prefill, what the prompt's last tokens attend to most",
        "TAKE eq. 3-13",
        score,
        select_prompt,
        PARAMETERS,
        needs=(Q_WINDOW,),
        schedule="chunked",
        always_kept=("take_probe",),
        window="take_probe",
        check=_check,
        parts=False,
        url="https://openreview.net/forum?id=kMLfUshPwo",
    )
)
