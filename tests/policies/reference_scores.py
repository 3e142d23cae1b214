"""Scores of every policy in float64, from the tensors of one layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .reference import Scores

Array = np.ndarray


@dataclass
class Turns:
    """A rotary embedding: angle `speeds[i]` per position for pair i, and a factor on all that is turned."""

    speeds: Array
    factor: float = 1.0
    interleaved: bool = False

    def matrix(self, position: int, size: int) -> Array:
        """What a vector of that size is multiplied by."""
        result = np.eye(size)
        pairs = len(self.speeds)
        for i, speed in enumerate(self.speeds):
            one, two = (2 * i, 2 * i + 1) if self.interleaved else (i, i + pairs)
            c, s = math.cos(position * speed), math.sin(position * speed)
            result[[one, one, two, two], [one, two, one, two]] = np.array([c, -s, s, c]) * self.factor
        return result

    def undone(self, rows: Array, first: int = 0) -> Array:
        """[n, d] after it, of positions from `first` on, as it was before."""
        size = rows.shape[1]
        return np.array([np.linalg.solve(self.matrix(first + i, size), row) for i, row in enumerate(rows)])


@dataclass
class Tensors:
    """float64 arrays of one layer; q [Hq, rows, d] ends with the window.

    earlier: of each KV head the keys [S, d] that were there before, where a part of a prompt is evicted; begins: its
    first position.
    """

    k: Array
    q: Array | None = None
    v: Array | None = None
    q_all: Array | None = None
    w_o: Array | None = None
    repeated: Array | None = None
    scale: float | None = None
    cap: float | None = None
    rotary: Turns | None = None
    earlier: list[Array] | None = None
    begins: int = 0

    def seen(self, head: int, stop: int) -> Array:
        """The keys that a token sees which is the last of the first `stop`."""
        own = self.k[head, :stop]
        return own if self.earlier is None else np.concatenate([self.earlier[head], own])

    @property
    def n(self) -> int:
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        return self.k.shape[0]

    def group(self, head: int) -> range:
        """Query heads of a KV head."""
        queries = next(x.shape[0] for x in (self.q, self.q_all, self.w_o) if x is not None)
        size = queries // self.heads
        return range(head * size, head * size + size)


@dataclass
class Scored:
    """Scores of the tokens before the window; the layer's weight; the scores of criticalkv's second stage.

    lift_margin: how far each token's cumulative share is from the limit that decides whether it is lifted.
    """

    scores: Scores | None
    weight: float | None = None
    second: Scores | None = None
    lift_margin: Scores | None = None


def attention_row(query: Array, keys: Array, scale: float | None, cap: float | None) -> Array:
    """Softmax of one query over keys [visible, d]."""
    z = keys @ query * (1 / math.sqrt(keys.shape[1]) if scale is None else scale)
    if cap:
        z = cap * np.tanh(z / cap)
    powers = np.exp(z - z.max())
    return powers / powers.sum()


def window_attention(t: Tensors, window: int, hq: int, head: int) -> Array:
    """[window, n]: what each window token of a query head attends to; 0 for what it does not see."""
    rows = np.zeros((window, t.n))
    for r in range(window):
        visible = t.n - window + r + 1
        query = t.q[hq, t.q.shape[1] - window + r]
        rows[r, :visible] = attention_row(query, t.seen(head, visible), t.scale, t.cap)[-visible:]
    return rows


def pooled(row: list[float], how: str, kernel: int) -> list[float]:
    """Pooling with the window cut off at both ends; an average always divides by the kernel.

    "decay": the first token has no part in what others get.
    """
    if how == "none":
        return list(row)
    if how == "decay":
        return [
            max(s * 0.95 ** abs(j - i) for i, s in enumerate(row) if -7 <= j - i <= 31 and (i > 0 or j == 0))
            for j in range(len(row))
        ]
    out = []
    for i in range(len(row)):
        near = row[max(0, i - kernel // 2) : i + kernel // 2 + 1]
        out.append(max(near) if how == "max" else math.fsum(near) / kernel)
    return out


def combined(rows: list[list[float]], how: str) -> list[float]:
    """Over the window's rows, the last of which is the prompt's last token."""
    if how != "recent":
        return reduced(rows, how)
    last = len(rows) - 1
    return reduced([[x * 0.5 ** ((last - r) / 12) for x in row] for r, row in enumerate(rows)], "max")


def reduced(rows: list[list[float]], how: str) -> list[float]:
    """One row from several, of queries or of the query heads of a group."""
    return [max(c) if how == "max" else math.fsum(c) / len(c) for c in zip(*rows, strict=True)]


def variance(column: Array) -> float:
    return float(((column - column.mean()) ** 2).sum() / (len(column) - 1)) if len(column) > 1 else 0.0


def norms(values: Array) -> list[float]:
    """L1 norms of the rows of one head."""
    return np.abs(values).sum(1).tolist()


def snapkv(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    result = []
    for head in range(t.heads):
        heads = []
        for hq in t.group(head):
            rows = window_attention(t, window, hq, head)[:, : t.n - window].tolist()
            heads.append(combined(rows, p["rows"]))
        result.append(pooled(reduced(heads, p["gqa"]), p["pooling"], p.get("kernel", 0)))
    return Scored(result)


def h2o(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    result = []
    for head in range(t.heads):
        sums = []
        for hq in t.group(head):
            total = np.zeros(t.n)
            for j in range(t.n):
                row = attention_row(t.q_all[hq, j], t.seen(head, j + 1), t.scale, t.cap)
                total[: j + 1] += row[-j - 1 :]
            sums.append(total.tolist())
        row = reduced(sums, "mean")[: t.n - window]
        if p["h2o_norm"] == "mean":
            row = [s / (t.n - i) for i, s in enumerate(row)]
        result.append(row)
    return Scored(result)


def lava(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    m = t.n - window
    result = []
    for head in range(t.heads):
        rows = []
        for hq in t.group(head):
            mean = window_attention(t, window, hq, head)[:, :m].mean(0).tolist()
            rows.append(pooled(mean, p["pooling"], p.get("kernel", 0)))
        largest = max(norms(t.v[head]))
        result.append([largest * s for s in reduced(rows, p["gqa"])])
    flat = [s for row in result for s in row]
    total = math.fsum(flat)
    if total <= 0 or len(flat) <= 1:
        return Scored(result, 1.0)
    shares = [s / total for s in flat]
    return Scored(result, -math.fsum(x * math.log(x) for x in shares if x > 0) / math.log(len(flat)))


def cake(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    m = t.n - window
    result, entropy, spread = [], 0.0, 0.0
    for head in range(t.heads):
        rows = []
        for hq in t.group(head):
            a = window_attention(t, window, hq, head)[:, :m]
            variances = [variance(a[:, i]) for i in range(m)]
            indicator = [a[:, i].mean() + p["gamma"] * variances[i] for i in range(m)]
            rows.append(pooled(indicator, p["pooling"], p.get("kernel", 0)))
            entropy -= float((a * np.log(a + 1e-10)).sum())
            spread += math.fsum(variances)
        result.append(reduced(rows, p["gqa"]))
    return Scored(result, max(entropy, 0.0) ** (1 / p["tau1"]) * spread ** (1 / p["tau2"]))


def vatp(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    base = snapkv(t, window, b, p).scores
    return Scored(
        [
            [s * size for s, size in zip(row, norms(t.v[head])[: len(row)], strict=True)]
            for head, row in enumerate(base)
        ]
    )


def tova(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    per_head = [
        [window_attention(t, window, hq, head)[:, : t.n - window].mean(0).tolist() for hq in t.group(head)]
        for head in range(t.heads)
    ]
    return Scored([reduced([row for rows in per_head for row in rows], "mean")] * t.heads)


def knorm(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    return Scored([[-math.sqrt(sum(x * x for x in key)) for key in keys[: t.n - window]] for keys in t.k])


def keydiff(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    result = []
    for keys in t.k:
        sizes = [math.sqrt(sum(x * x for x in key)) for key in keys]
        units = [key / max(size, 1e-12) for key, size in zip(keys, sizes, strict=True)]
        anchor = sum(units) / t.n
        length = max(math.sqrt(sum(x * x for x in anchor)), 1e-8)
        row = [
            -float(key @ anchor) / (max(size, 1e-8) * length) for key, size in zip(keys, sizes, strict=True)
        ]
        result.append(row[: t.n - window])
    return Scored(result)


def projected_norms(t: Tensors, window: int) -> Scores:
    """Size of what each past token adds to the layer's output, mean over the query heads of its group."""
    return [
        reduced([norms(t.v[head, : t.n - window] @ t.w_o[hq]) for hq in t.group(head)], "mean")
        for head in range(t.heads)
    ]


def criticalkv(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    base = snapkv(t, window, b, p).scores
    second = [
        [(s + 1e-4) * size for s, size in zip(row, sizes, strict=True)]
        for row, sizes in zip(base, projected_norms(t, window), strict=True)
    ]
    return Scored(base, second=second)


def defensivekv(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """b: tokens besides the window of each head, which also bounds how many are lifted."""
    m = t.n - window
    sizes = projected_norms(t, window)
    result, means = [], []
    for head in range(t.heads):
        attention = [window_attention(t, window, hq, head)[:, :m] for hq in t.group(head)]
        rows = []
        for row in (row.tolist() for a in attention for row in a):
            smooth = pooled(row, "avg", p["kernel"])
            mass = math.fsum(smooth)
            rows.append([x * (math.fsum(row) / mass if mass else 0.0) for x in smooth])
        worst = reduced(rows, "max")
        floor = math.fsum(worst) / m
        for i in range(m):
            norm = math.fsum(row[i] for row in sizes)
            worst[i] = max(worst[i], floor) * (sizes[head][i] / norm if norm else 0.0)
        result.append(worst)
        means.append(reduced([row.tolist() for a in attention for row in a], "mean"))
    top = max(s for row in result for s in row)
    margins = []
    for row, mean in zip(result, means, strict=True):
        past = math.fsum(mean)
        limit = p["mass"] - (1 - past)
        margin = [math.inf] * m
        seen = 0.0
        for rank, i in enumerate(sorted(range(m), key=lambda i, mean=mean: (-mean[i], i))):
            seen += mean[i]
            if past > 0 and rank < b:
                margin[i] = abs(seen / past - limit)
                if seen / past < limit:
                    row[i] = top
        margins.append(margin)
    return Scored(result, lift_margin=margins)


def take(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """The whole prompt in one chunk: its last tokens see those before them, and not each other."""
    m = t.n - window
    result = []
    for head in range(t.heads):
        rows = []
        for hq in t.group(head):
            seen = [attention_row(query, t.k[head, :m], t.scale, t.cap) for query in t.q[hq, -window:]]
            rows.append(np.mean(seen, axis=0).tolist())
        result.append(pooled(reduced(rows, p["gqa"]), "avg", p["kernel"]))
    return Scored(result)


def kvzip(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """What repeating paid is given; test_kvzip.py has its reference. A window's queries may ask for more."""
    m, result = t.n - window, []
    for head in range(t.heads):
        row = t.repeated[head, :m].tolist()
        if p["window"]:
            asking = [window_attention(t, window, hq, head)[:, :m] for hq in t.group(head)]
            most = reduced([line.tolist() for rows in asking for line in rows], "max")
            near = pooled(most, p["pooling"], p.get("kernel", 0))
            row = [max(pair) for pair in zip(row, near, strict=True)]
        result.append(row)
    return Scored(result)


def standardized(rows: Array) -> Array:
    """All entries: less their mean, over their standard deviation."""
    return (rows - rows.mean()) / max(rows.std(), 1e-6)


def leverage(rows: Array) -> Array:
    """How hard it is to make each row, less the mean, of the others; a little ridge."""
    rows = rows - rows.mean(0)
    return np.diag(rows @ np.linalg.inv(rows.T @ rows + 5e-3 * np.eye(rows.shape[1])) @ rows.T)


def compactor(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    numbers = torch.randn(t.k.shape[2], 48, generator=torch.Generator().manual_seed(42))
    sketches = [t.rotary.undone(keys, t.begins) @ (numbers.double().numpy() / math.sqrt(48)) for keys in t.k]
    received = np.zeros((t.heads, t.n))
    for head in range(t.heads):
        for hq in t.group(head):
            for i in range(t.n):
                tile = slice(i // 128 * 128, min(i // 128 * 128 + 128, t.n))
                received[head, tile] += attention_row(t.q_all[hq, i], t.k[head, tile], 1.0, None)
    unusual = []
    for start in range(0, t.n, p["leverage_chunk"]):
        chunk = [leverage(rows[start : start + p["leverage_chunk"]]) for rows in sketches]
        unusual.append(standardized(np.array(chunk)))
    scores = standardized(received) + p["blend"] * np.concatenate(unusual, 1)
    return Scored(scores[:, : t.n - window].tolist())


def expected_attention(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """b: tokens that each head keeps, which may be fewer than the sinks that are asked for."""
    sinks, size = min(p["sinks"], b), t.k.shape[2]
    scale = 1 / math.sqrt(size) if t.scale is None else t.scale
    turn = np.mean([t.rotary.matrix(t.begins + t.n + i, size) for i in range(p["n_future"])], axis=0)
    result = []
    for head in range(t.heads):
        shares = []
        for hq in t.group(head):
            queries = t.rotary.undone(t.q_all[hq], t.begins)[sinks:]
            mean = turn @ queries.mean(0)
            covariance = turn @ np.cov(queries.T, bias=True).reshape(size, size) @ turn.T
            z = [k @ mean * scale + k @ covariance @ k * scale**2 / 2 for k in t.seen(head, t.n)[sinks:]]
            powers = np.exp(np.array(z) - max(z))
            shares.append((powers / powers.sum()).tolist()[sinks - t.n :])
        sizes = np.sqrt((t.v[head, sinks:] ** 2).sum(1))
        row = (np.array(reduced(shares, "mean")) + p["epsilon"]) * sizes
        result.append([math.inf] * sinks + row.tolist())
    return Scored(result)


def dropkv(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """By dropping each token in turn, and looking how far the outputs move."""
    m, result = t.n - window, []
    for head in range(t.heads):
        row = [0.0] * m
        for hq in t.group(head):
            for attention in window_attention(t, window, hq, head):
                output = attention @ t.v[head]
                for j in range(m):
                    rest = attention.copy()
                    rest[j] = 0
                    moved = rest @ t.v[head] / rest.sum() - output
                    row[j] += float(moved @ moved)
        result.append(pooled(row, p["pooling"], p.get("kernel", 0)))
    return Scored(result)


SCORE: dict[str, Callable[[Tensors, int, int, dict[str, Any]], Scored] | None] = {
    "full": None,
    "streaming-llm": None,
    "h2o": h2o,
    "snapkv": snapkv,
    "pyramidkv": snapkv,
    "ada-snapkv": snapkv,
    "ada-pyramid": snapkv,
    "lava": lava,
    "lava-uniform": lava,
    "lava-pyramid": lava,
    "lava-uniform-head": lava,
    "cake": cake,
    "vatp-snapkv": vatp,
    "tova": tova,
    "knorm": knorm,
    "keydiff": keydiff,
    "criticalkv": criticalkv,
    "ada-criticalkv": criticalkv,
    "defensivekv": defensivekv,
    "layer-defensivekv": defensivekv,
    "take": take,
    "kvzip": kvzip,
    "compactor": compactor,
    "expected-attention": expected_attention,
    "dropkv": dropkv,
}
"""Per policy: (tensors, window, tokens per head besides the window, parameters) -> scores."""
