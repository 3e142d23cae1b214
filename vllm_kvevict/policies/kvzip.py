"""kvzip: the tokens that a model needs to repeat its prompt, all heads of all layers sharing one budget (KVzip: Kim et
al. 2025, section 3).

The prompt is read once more, chunk by chunk, as rows behind it that ask to repeat the chunk and then do so. For chunk
[lo, hi) and its R rows q[h', r]:

s[h, i] = the most that i in [lo, hi) receives, over the query heads h' of the group of h and all rows r, of
          softmax(q[h', r] . K * scale) over the keys of the first `sinks` tokens, of [lo, hi) and of the rows up to r

The first `sinks` tokens and the last `window` stay, then the best candidates of the whole model (`whole_model`). With
window=0 no question is read: what stays serves any. With a window, for a prompt that ends with its question,

s[h, i] = the larger of the above and of what i receives at most from the window's rows in the query heads of h, that
          maximum pooled by `pooling` and `kernel` as in snapkv

Chunks of kvzip_chunk=512 tokens (the authors' 2,000 keep less of what is
asked for at small budgets). The rows attend to all of the prompt (kvzip_sees=all, as the authors), or only to the keys
over which scores are taken (chunk), which is cheaper.
"""

import torch
from torch import Tensor

from . import whole_model
from .attention import reduce_group, window_attention, window_scores
from .config import EvictionConfig
from .inputs import Q_WINDOW, REPEATED
from .layer import Comm, LayerInputs, LayerScores
from .params import (
    KERNEL,
    POOLING,
    SINKS,
    check_some_stay,
    choice,
    integer,
    limited,
    measured,
    server_only,
    unless,
)
from .registry import Policy, register

MIN_CHUNK = 64
"""Tokens of a chunk at least, unless the prompt is shorter: scores of tokens of tiny chunks say little."""

MOST_SINKS = 64
"""Sinks of a request at most, and of what is left of earlier parts of its prompt, the entries that stand in for them.
Each repeat with kvzip_sees=chunk reads a copy of them, whose pages must be counted before anything is known of the
parts. Models have a handful of sinks."""


def repeat_attention(
    query: Tensor, keys: Tensor, candidates: slice, scale: float, softcap: float | None
) -> Tensor:
    """The most attention that each token of a chunk receives from the rows that repeat it (KVzip eq. 2).

    Args:
        query: [Hq, R, d], of the rows, after RoPE, not scaled.
        keys: [Hkv, N, d], over which attention is taken: the last R are the rows' own, and each row sees those up to
            itself.
        candidates: the chunk's among the keys.
        scale, softcap: of the logits; a softcap of None or 0 is none.

    Returns:
        fp32 [Hkv, tokens of the chunk], the most over rows and over the query heads of each KV head that are here.
    """
    heads, total, _ = keys.shape
    grouped = query.float().mul(scale).unflatten(0, (heads, -1))
    buffer = torch.empty(*grouped.shape[1:3], total, dtype=torch.float32, device=keys.device)
    most = []
    for rows, own in zip(grouped, keys, strict=True):
        attention = window_attention(rows, own, softcap, buffer)
        most.append(attention[:, :, candidates].amax((0, 1)))
    return torch.stack(most)


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """What each candidate received at most when the prompt was repeated, or from the window's queries."""
    p, window = cfg.params, cfg.window_for(inputs.num_tokens)
    # Ranks that share a KV head have query heads of their own.
    rows = [reduce_group(head[None], "max", comm) for head in inputs.read(REPEATED)]
    scores = torch.stack(rows)[:, : inputs.num_tokens - window]
    if p["window"]:
        asked = window_scores(
            inputs, window, rows="max", gqa="max", pooling=p["pooling"], kernel=p.get("kernel"), comm=comm
        )
        scores = torch.maximum(scores, asked)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


register(
    Policy(
        "kvzip",
        "what the model attends to when it repeats the prompt; all heads of all layers compete",
        "KVzip, section 3",
        score,
        whole_model.select_best,
        (
            server_only(integer("kvzip_chunk", 512, MIN_CHUNK)),
            server_only(choice("kvzip_sees", "all", "chunk")),
            limited(SINKS, MOST_SINKS),
            integer("window", 0, 0),
            unless(KERNEL, window=0),
            unless(measured(POOLING, "decay"), window=0),
        ),
        needs=(REPEATED,),
        window_needs=(Q_WINDOW,),
        window_rows="max",
        schedule="by repeat",
        always_kept=("sinks", "window"),
        check=check_some_stay,
        url="https://arxiv.org/abs/2505.23416",
    )
)
