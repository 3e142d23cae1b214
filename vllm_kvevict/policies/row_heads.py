"""From the scores of rows of different lengths to what they keep: `heads`, with a cap for every head.

B counts the entries of a row that are not pinned. A row keeps its window, min(w, its entries), and the m_h entries
before that are its candidates. Without competition each row keeps its best B - window of them, or all. Heads that
compete share Hkv*B less their windows, or all that there are, none getting more than its m_h (`capped_safeguard`).

The order is by score, then age, then head; the age of an entry is counted from the end of its row, which is the same
token in all rows. What is no candidate comes after all that are, whatever they score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .budgets import MILLION, capped_safeguard
from .config import EvictionConfig
from .layer import Comm, Kept, LayerScores
from .rows import RaggedRows, budget_and_window, compete_over_ranks, evicts_rows
from .select import best_of_layers, count_best, order_keys

_NOBODY = torch.iinfo(torch.int64).min


def best_of_rows(cfg: EvictionConfig, layers: Sequence[LayerScores], comm: Comm | None) -> Kept:
    """As a policy's `select`: what is pinned, the window and the best others of each row, or of all rows of a layer.

    Indices count within a row's own entries, pinned ones included. A collective where heads compete over ranks.
    """
    comm = compete_over_ranks(cfg, comm)
    rows = [RaggedRows.of(x) for x in layers]
    entries = _of_all_heads([x.entries for x in rows], layers[0].device, comm)
    kept = [[torch.arange(length, device=layers[0].device) for length in x.lengths] for x in rows]
    chosen = [i for i, counts in enumerate(entries) if evicts_rows(cfg, counts)]
    if chosen:
        found = _best_candidates(cfg, [layers[i] for i in chosen], [entries[i] for i in chosen], comm)
        window = budget_and_window(cfg)[1]
        for i, candidates in zip(chosen, found, strict=True):
            kept[i] = _with_the_others(candidates, rows[i], window)
    return kept


def _of_all_heads(entries: list[list[int]], device: torch.device, comm: Comm | None) -> list[list[int]]:
    """From [layer][KV head of this rank] to [layer][KV head that competes]."""
    if comm is None:
        return entries
    counts: list[list[int]] = comm.gather_heads(torch.tensor(entries, device=device).T).T.tolist()
    return counts


def _best_candidates(
    cfg: EvictionConfig, layers: Sequence[LayerScores], entries: Sequence[Sequence[int]], comm: Comm | None
) -> Kept:
    """The best candidates of each row, ascending, counted from the row's first entry that is not pinned.

    entries: of all heads that compete in each of the layers, which all lose some.
    """
    budget, window = budget_and_window(cfg)
    mine = slice(None) if comm is None else comm.local_heads
    caps = [[max(0, count - window) for count in counts] for counts in entries]
    width = max(map(max, caps))
    keys = [_keys(x, own[mine], width, comm) for x, own in zip(layers, caps, strict=True)]
    if cfg.heads_compete:
        totals = [
            sum(own) - (sum(counts) - budget * len(counts)) for own, counts in zip(caps, entries, strict=True)
        ]
        counts = _counts_of_competing(cfg, keys, totals, caps, comm)
    else:
        counts = [[min(cap, budget - window) for cap in own] for own in caps]
    found = best_of_layers(keys, counts)
    return [
        [columns - (width - cap) for columns, cap in zip(layer, own[mine], strict=True)]
        for layer, own in zip(found, caps, strict=True)
    ]


def _keys(layer: LayerScores, caps: Sequence[int], width: int, comm: Comm | None) -> Tensor:
    """Order keys [Hkv, width] of a layer, whose last caps[h] columns are candidates of head h."""
    m = max(caps)
    scores = layer.scores
    if scores is None and not m:
        scores = torch.empty(len(caps), 0, device=layer.device)
    if scores is None or scores.shape != (len(caps), m):
        found = None if scores is None else list(scores.shape)
        raise ValueError(f"scores of layer {layer.layer} must be [{len(caps)}, {m}], not {found}")
    # All ranks count columns from the same end.
    scores = functional.pad(scores, (width - m, 0))
    first, total = (0, None) if comm is None else (comm.local_heads.start, comm.num_kv_heads_total)
    keys = order_keys(scores, first, total)
    if min(caps) == width:
        return keys
    missing = torch.tensor([[width - cap] for cap in caps], device=keys.device)
    return keys.masked_fill(torch.arange(width, device=keys.device) < missing, _NOBODY)


def _counts_of_competing(
    cfg: EvictionConfig,
    keys: Sequence[Tensor],
    totals: Sequence[int],
    caps: Sequence[Sequence[int]],
    comm: Comm | None,
) -> list[list[int]]:
    """How many candidates each head of this rank keeps of those that compete, by Ada-KV Alg. 1-2 with caps.

    totals[i]: of all heads of a layer, whose caps are caps[i].
    """
    params = cfg.params
    alpha, is_guaranteed = params.get("alpha", 0.0), params.get("ada_safeguard") == "guarantee"
    mine = slice(None) if comm is None else comm.local_heads
    if is_guaranteed:
        sure = [
            round(alpha * MILLION) * total // (MILLION * len(own))
            for total, own in zip(totals, caps, strict=True)
        ]
        own_first = [[min(cap, count) for cap in own[mine]] for count, own in zip(sure, caps, strict=True)]
        counted: list[list[int]] = count_best(keys, totals, own_first, comm).tolist()
        return counted
    best = count_best(keys, totals, [0] * len(keys), comm)
    if comm is not None:
        best = comm.gather_heads(best.T).T
    shares = zip(best.tolist(), caps, totals, strict=True)
    return [capped_safeguard(counts, own, total, alpha)[mine] for counts, own, total in shares]


def _with_the_others(candidates: list[Tensor], rows: RaggedRows, window: int) -> list[Tensor]:
    """For each row what is pinned, its candidates and its window, counted within the row."""
    kept = []
    for chosen, length, pinned in zip(candidates, rows.lengths, rows.pinned, strict=True):
        first = torch.arange(pinned, device=chosen.device)
        last = torch.arange(max(pinned, length - window), length, device=chosen.device)
        kept.append(torch.cat((first, chosen + pinned, last)))
    return kept
