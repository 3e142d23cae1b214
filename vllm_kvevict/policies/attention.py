"""Scores from the attention of the last tokens (SnapKV's observation window)."""

import torch
from torch import Tensor
from torch.nn import functional

from .layer import Comm, LayerInputs


def window_attention(query: Tensor, keys: Tensor, softcap: float | None, out: Tensor) -> Tensor:
    """Attention of the window to all tokens of one KV head.

    query fp32 [g, w, d], already multiplied by the logit scale; keys [n, d]. Row r is the query of token
    n-w+r and sees the keys up to itself. Writes fp32 probabilities to `out` [g, w, n] and returns it.
    """
    group, window, _ = query.shape
    # One product per query head (the keys are broadcast, not copied): its bits then do not depend on how
    # many heads of the group this rank holds.
    logits = torch.bmm(query, keys.float().t().expand(group, -1, -1), out=out)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(1)
    logits[:, :, keys.shape[0] - window :].masked_fill_(future, float("-inf"))
    return torch.softmax(logits, dim=-1, out=logits)


def reduce_group(rows: Tensor, how: str) -> Tensor:
    """[g, m] -> [m]: mean or max over the query heads of one KV head."""
    if how == "max":
        return rows.amax(0)
    total = rows[0].clone()
    for row in rows[1:]:  # in head order: a library reduction may round differently from shape to shape
        total += row
    return total.div_(rows.shape[0])


def pool(scores: Tensor, how: str, kernel: int) -> Tensor:
    """[Hkv, m] -> [Hkv, m]: max or average of the `kernel` scores around each candidate, or unchanged.

    The neighbourhood ends at the first and last candidate; "avg" divides by `kernel` there too.
    """
    if how == "none":
        return scores
    pooling = functional.max_pool1d if how == "max" else functional.avg_pool1d
    return pooling(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def window_scores(
    inputs: LayerInputs, window: int, *, pooling: str, kernel: int, gqa: str, comm: Comm | None
) -> Tensor:
    """SnapKV scores, fp32 [Hkv, m], of the m = n - window tokens before the window.

    Softmax over all n keys, slice of the candidates, mean over the window's rows, reduction over the
    query heads of each KV head, pooling. SnapKV section 4; GQA reduction as in Ada-KV section 3.5.
    Raises ValueError naming q_window if it is missing or has a wrong shape.
    """
    query = inputs.check_queries(window)
    heads, n, size = inputs.keys.shape
    scale = size**-0.5 if inputs.scale is None else inputs.scale
    grouped = query.float().mul(scale).view(heads, -1, window, size)
    scores = query.new_empty(heads, n - window, dtype=torch.float32)
    # One KV head at a time, in one buffer: for long prompts fresh memory costs as much as the arithmetic.
    buffer = query.new_empty(grouped.shape[1], window, n, dtype=torch.float32)
    for head in range(heads):
        attention = window_attention(grouped[head], inputs.keys[head], inputs.logit_softcap, buffer)
        rows = attention[:, :, : n - window].mean(1)
        if comm is not None:
            rows = comm.gather_group_rows(rows)
        scores[head] = reduce_group(rows, gqa)
    return pool(scores, pooling, kernel)
