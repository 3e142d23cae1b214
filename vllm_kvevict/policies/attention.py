"""Scores from the attention of the last tokens (SnapKV's observation window)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .inputs import Q_WINDOW, RECEIVED
from .layer import Comm, LayerInputs

_BLOCK = 128

DECAY, AFTER, BEFORE = 0.95, 32, 8
"""Of pooling "decay": the factor of a score for each token of distance, and how many distances it reaches, from 0 on:
among later tokens, and among earlier ones. Powers of two."""
HALF_LIFE = 12
"""Of rows "recent": a query that lies so many tokens further back counts half as much."""


def window_attention(
    query: Tensor, keys: Tensor, softcap: float | None, out: Tensor, causal: bool = True
) -> Tensor:
    """Attention of the window to all tokens of one KV head.

    query fp32 [g, w, d], already multiplied by the logit scale; keys [n, d]. Row r is the query of token
    n-w+r and sees the keys up to itself, or all keys if not `causal`. Writes fp32 probabilities to `out` [g, w, n]
    and returns it.
    """
    group, window, _ = query.shape
    # One product per query head (the keys are broadcast, not copied): its bits then do not depend on how
    # many heads of the group this rank holds.
    logits = torch.bmm(query, keys.float().t().expand(group, -1, -1), out=out)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if causal:
        future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(1)
        logits[:, :, keys.shape[0] - window :].masked_fill_(future, float("-inf"))
    return torch.softmax(logits, dim=-1, out=logits)


def reduce_group(rows: Tensor, how: str, comm: Comm | None) -> Tensor:
    """[g, m] -> [m]: mean or max over the query heads of one KV head, also those on other ranks."""
    if comm is not None:
        rows = comm.gather_group_rows(rows)
    return rows.amax(0) if how == "max" else add_rows(rows).div_(rows.shape[0])


def add_rows(rows: Tensor) -> Tensor:
    """[r, m] -> [m]: the sum, in row order, since a library's may round differently from shape to shape."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def pool(scores: Tensor, how: str, kernel: int | None, first: Tensor | None = None) -> Tensor:
    """[Hkv, m] -> [Hkv, m]: each candidate's score combined with its neighbours', as `how` says.

    first: int64 [Hkv, 1], the column of each row's first candidate, 0 if None. Before it scores must be 0, and what
    stands there afterwards means nothing.

    "max", "avg": of the `kernel` scores around it, an odd number; "avg" divides by `kernel` at the ends too.
    "decay": s'[j] = max(s[j-t] * g^t over 0 <= t < 32, s[j+t] * g^t over 0 <= t < 8), g = 0.95, for scores that are
    not negative: what follows a high score is kept further than what precedes it, and a higher one reaches further.
    The first token is an attention sink in most heads, whatever comes after it: it counts for itself alone. `kernel`
    plays no part. "none": unchanged.

    The neighbourhood ends at the first and last candidate.
    """
    if how == "none":
        return scores
    if how == "decay":
        # Scores are not negative, so 0 reaches nobody.
        first = torch.zeros_like(scores[..., :1], dtype=torch.int64) if first is None else first
        reaching = scores.scatter(-1, first, 0.0)
        earlier = _spread(reaching.flip(-1), BEFORE).flip(-1)
        later = _spread(reaching, AFTER)
        later.scatter_(-1, first, scores.gather(-1, first))
        return torch.maximum(later, earlier)
    assert kernel is not None
    pooling = functional.max_pool1d if how == "max" else functional.avg_pool1d
    return pooling(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def _spread(scores: Tensor, reach: int) -> Tensor:
    """The largest scores[j-t] * DECAY^t over 0 <= t < reach, a power of two, along the last dimension, in place."""
    distance = 1
    while distance < reach:
        # Twice as many distances each time: those of the result so far, and the same again behind them.
        further = scores[..., :-distance] * DECAY**distance
        later = scores[..., distance:]
        torch.maximum(later, further, out=later)
        distance *= 2
    return scores


def window_queries(inputs: LayerInputs, window: int) -> Tensor:
    """The queries of the last tokens by KV head, times the factor of the logits: fp32 [Hkv, g, window, d].

    Raises ValueError naming q_window if it is missing or has a wrong shape.
    """
    query = inputs.read(Q_WINDOW, window)
    query = query[:, query.shape[1] - window :].float().mul(logit_scale(inputs))
    return query.view(inputs.num_kv_heads, -1, window, query.shape[2])


def window_rows(inputs: LayerInputs, window: int) -> Iterator[Tensor]:
    """For each KV head in turn the window's attention, fp32 [g, window, n]; the next head overwrites it.

    Softmax over all n keys, of which the first n - window are the candidates (SnapKV section 4), and over those that
    earlier evictions have left. Of rows with lengths of their own, n is the row's, or `window` if it has fewer: such a
    row has no candidates.
    Raises ValueError as `window_queries`.
    """
    grouped, n = window_queries(inputs, window), inputs.num_tokens
    counts = [n] * len(grouped) if inputs.lengths is None else inputs.lengths.clamp(min=window).tolist()
    most = max((len(keys) for keys in inputs.earlier_keys or ()), default=0)
    # One KV head at a time, in one buffer: for long prompts fresh memory costs as much as the arithmetic.
    buffer = grouped.new_empty(grouped.shape[1] * window * (most + n))
    for query, keys, count in zip(grouped, inputs.seen_keys(), counts, strict=True):
        earlier = len(keys) - n
        seen = keys[n - count :]
        rows = buffer[: query.shape[0] * window * len(seen)].view(-1, window, len(seen))
        yield window_attention(query, seen, inputs.logit_softcap, rows)[:, :, earlier:]


def received(inputs: LayerInputs, window: int, how: str = "mean") -> Iterator[Tensor]:
    """For each KV head in turn what each token before the window receives of its attention, fp32 [g, m].

    Of rows with lengths of their own, m is the number of the row's candidates.

    how: over the window's rows, see `combine_rows`. Raises ValueError naming window_mean, window_max or window_recent,
    or q_window as `window_rows` does.
    """
    if inputs.has(RECEIVED[how]):
        known = inputs.read(RECEIVED[how], window).unflatten(0, (inputs.num_kv_heads, -1))
        if inputs.lengths is None:
            yield from known
            return
        for rows, count in zip(known, inputs.lengths.tolist(), strict=True):
            yield rows[:, rows.shape[1] - max(0, count - window) :]
        return
    for rows in window_rows(inputs, window):
        yield combine_rows(rows[:, :, : rows.shape[2] - window], how)


def combine_rows(attention: Tensor, how: str) -> Tensor:
    """[g, w, m] -> [g, m]: over the window's rows their "mean", their "max", or the "recent" maximum.

    "recent": the largest of a[r] * 2^(-(w-1-r) / 12), so that the last queries, which come closest to what the answer
    will look for, count most. `attention` is then overwritten.
    """
    if how == "mean":
        return attention.mean(1)
    if how == "recent":
        back = torch.arange(attention.shape[1] - 1, -1, -1, dtype=torch.float32, device=attention.device)
        attention.mul_(torch.exp2(-back / HALF_LIFE)[:, None])
    return attention.amax(1)


def add_column_sums(
    out: Tensor, query: Tensor, keys: Iterable[Tensor], stop: int, scale: float, softcap: float | None
) -> None:
    """Add to `out` what each token receives of the attention of some queries (H2O's accumulated scores).

    query [Hq, r, d], not scaled: the last r of the first `stop` tokens, each of which sees the keys up to
    itself; keys: of each KV head [S_h + stop, d], those that earlier evictions have left before the tokens' own; out
    fp32 [Hq, >= stop]. Chunks of a prompt can be added one after another.
    The softmax is over all visible keys; memory is that of 128 rows of attention of one KV head.
    """
    heads = list(keys)
    rows, start = query.shape[1], stop - query.shape[1]
    grouped = query.unflatten(0, (len(heads), -1))
    group, most = grouped.shape[1], max(map(len, heads))
    buffer = torch.empty(group * min(rows, _BLOCK) * most, dtype=torch.float32, device=query.device)
    for head, seen in enumerate(heads):
        key, earlier = seen.float(), len(seen) - stop
        for first in range(0, rows, _BLOCK):
            block = grouped[head, :, first : first + _BLOCK].float().mul(scale)
            end = start + first + block.shape[1]
            logits = buffer[: group * block.shape[1] * (earlier + end)].view(group, -1, earlier + end)
            attention = window_attention(block, key[: earlier + end], softcap, logits)
            for i in range(group):  # one by one, for the same bits however many heads are here
                out[head * group + i, :end] += attention[i, :, earlier:].sum(0)


def logit_scale(inputs: LayerInputs) -> float:
    """The factor of the logits."""
    return inputs.keys.shape[2] ** -0.5 if inputs.scale is None else inputs.scale


def window_scores(
    inputs: LayerInputs,
    window: int,
    *,
    rows: str,
    gqa: str,
    pooling: str,
    kernel: int | None,
    comm: Comm | None,
) -> Tensor:
    """SnapKV scores, fp32 [Hkv, m], of the m = n - window tokens before the window.

    Over the window's rows (`combine_rows`), then over the query heads of each KV head, then pooling. SnapKV section 4
    has the mean of rows; GQA reduction as in Ada-KV section 3.5. Rows with lengths of their own stand at the right end;
    what is before their candidates means nothing. Raises ValueError as `received` does.
    """
    scores = [reduce_group(heads, gqa, comm) for heads in received(inputs, window, rows)]
    if inputs.lengths is None:
        return pool(torch.stack(scores), pooling, kernel)
    m = inputs.num_tokens - window
    missing = [m - len(row) for row in scores]
    padded = [functional.pad(row, (before, 0)) for row, before in zip(scores, missing, strict=True)]
    first = torch.tensor(missing, device=padded[0].device).clamp_(max=m - 1)[:, None]
    return pool(torch.stack(padded), pooling, kernel, first)
