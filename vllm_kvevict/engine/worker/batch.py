"""One step's batch, divided between our kernels and paged attention: one sequence per (request, KV head)."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_kvevict.cache import Extension, PagedKVCache
from vllm_kvevict.cache.steps import to_device

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """What attention reads in one layer. S sequences of one KV head each.

    Attributes:
        seq_lens: [S] int32, entries of each sequence with this step's.
        block_table: [S, width] int32, pages of each sequence.
        query_start_loc: [S + 1] int32, where each sequence's queries start.
        longest: at least the largest of seq_lens.
        longest_query: the largest number of queries of a sequence.
    """

    seq_lens: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    longest: int
    longest_query: int


def split_by_head(sequences: Sequences, num_queries: int, heads: int) -> tuple[Tensor, list[Sequences]]:
    """The sequences of each KV head, which come in turn.

    Returns:
        int64 [heads, num_queries / heads], the queries of each head; and its sequences.
    """
    lengths = sequences.query_start_loc.diff()
    head = torch.arange(len(lengths), device=lengths.device).remainder(heads)
    head_of_query = head.repeat_interleave(lengths, output_size=num_queries)
    rows = head_of_query.argsort(stable=True).view(heads, -1)
    # Each head has the same number of queries.
    starts = sequences.query_start_loc[::heads] // heads
    split = [
        replace(
            sequences,
            seq_lens=sequences.seq_lens[head::heads].contiguous(),
            block_table=sequences.block_table[head::heads].contiguous(),
            query_start_loc=starts,
        )
        for head in range(heads)
    ]
    return rows, split


@dataclass(frozen=True)
class Call:
    """Requests that one call of paged attention serves in every layer. R requests, H KV heads, L layers.

    Attributes:
        seq_lens: [L, R * H] int32.
        block_tables: [L, R * H, width] int32.
        query_start_loc, longest, longest_query: of all layers, as in :class:`Sequences`.
        gather: int64, for each query in the order (request, head, token) its place (token, head) in the batch;
            None when the two orders are the same.
    """

    seq_lens: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    longest: int
    longest_query: int
    gather: Tensor | None

    def sequences(self, layer: int) -> Sequences:
        """What one layer reads."""
        return Sequences(
            self.seq_lens[layer],
            self.block_tables[layer],
            self.query_start_loc,
            self.longest,
            self.longest_query,
        )


@dataclass(frozen=True)
class Served:
    """Requests that one of our kernels serves. R requests with N tokens.

    Attributes:
        request_slots: int64 [R], the requests; negative ones are padding.
        tokens: int64 [N], their tokens in the batch, request by request; None when these are all of it, in this order.
        new_tokens: int32 [R], of each request; None, for decodes: one each.
    """

    request_slots: Tensor
    tokens: Tensor | None
    new_tokens: Tensor | None = None


@dataclass(frozen=True)
class ByLayer:
    """A request whose pages each layer takes for itself, since all it has is in this step. T tokens, H KV heads.

    Attributes:
        request_slot: the request.
        rows: its tokens in the batch.
        seq_lens: [H] int32, T of each head.
        query_start_loc: [H + 1] int32.
        served: it as a request that one of our kernels serves.
        is_prefilled: whether our kernel for prompts does; paged attention otherwise, where there is one.
    """

    request_slot: int
    rows: slice
    seq_lens: Tensor
    query_start_loc: Tensor
    served: Served
    is_prefilled: bool

    def sequences(self, table: Tensor) -> Sequences:
        """What a layer reads whose pages are in ``table`` (int32 [H, pages])."""
        tokens = self.rows.stop - self.rows.start
        return Sequences(self.seq_lens, table, self.query_start_loc, tokens, tokens)


@dataclass(frozen=True)
class Batch:
    """Index tensors of a step, made once and used by every layer.

    Attributes:
        num_tokens: T, the step's tokens.
        entry_slots: [L, T * H] int64, where new entries go, in the order (token, head): all of them, since to leave
            out the few of decodes would cost more, but -1 for those of ``by_layer``; None when there is nothing else.
        calls: one call of paged attention each.
        decodes: what our decode kernel serves.
        by_layer: what each layer makes room for.
        prefills: what our kernel for prompts serves.
    """

    num_tokens: int
    entry_slots: Tensor | None
    calls: list[Call]
    decodes: Served | None
    by_layer: list[ByLayer] = field(default_factory=list)
    prefills: Served | None = None


def lay_out_by_layer(
    cache: PagedKVCache, request_slot: int, rows: slice, fewest_prefilled: int | None
) -> ByLayer:
    """Lay out a request whose layers make room for its tokens one by one; its slot must be empty.

    Args:
        fewest_prefilled: as of :func:`lay_out`.
    """
    tokens, heads, device = rows.stop - rows.start, cache.num_kv_heads, cache.device
    cache.announce(request_slot, tokens)
    starts = torch.arange(heads + 1, dtype=torch.int32, device=device) * tokens
    slots = torch.tensor([request_slot], device=device)
    served = Served(slots, torch.arange(rows.start, rows.stop, device=device), starts.diff()[:1])
    is_prefilled = fewest_prefilled is not None and tokens >= fewest_prefilled
    return ByLayer(request_slot, rows, starts.diff(), starts, served, is_prefilled)


def lay_out(
    cache: PagedKVCache,
    step: Extension,
    most_new_tokens: int,
    num_tokens: int | None = None,
    order: IntArray | None = None,
    fewest_prefilled: int | None = None,
) -> Batch:
    """Lay out a step.

    Args:
        cache: the rank's cache, already extended by the step.
        step: what :meth:`PagedKVCache.extend` returned.
        most_new_tokens: requests with at most so many tokens are our decode kernel's.
        num_tokens: tokens of the batch; None when they are the step's.
        order: where in the batch the step's tokens are, request by request; None when they are in this order.
        fewest_prefilled: requests with at least so many tokens are our kernel's for prompts; paged attention serves
            what is left. None: there is no such kernel.
    """
    total = num_tokens or int(step.tokens.sum())
    decoded = step.tokens <= most_new_tokens
    decodes = _served(step, decoded, order) if decoded.any() else None
    if decodes is not None and step.tokens[decoded].max() == 1:
        decodes = replace(decodes, new_tokens=None)
    if decoded.all():
        return Batch(total, None, [], decodes)
    prefilled = ~decoded & (fewest_prefilled is not None and step.tokens >= fewest_prefilled)
    prefills = _served(step, prefilled, order) if prefilled.any() else None
    widths = -(-np.asarray(step.max_lens, np.int64) // cache.page_size)
    calls = []
    for requests in _calls(step.tokens, widths, np.flatnonzero(~decoded & ~prefilled)):
        calls.append(_call(cache, step, requests, int(widths[requests].max()), order))
    return Batch(total, _entry_slots(cache, step, total, order), calls, decodes, prefills=prefills)


def _served(step: Extension, served: NDArray[np.bool_], order: IntArray | None) -> Served:
    """Those of the step's requests that one of our kernels serves."""
    device = step.request_slots.device
    new_tokens = to_device(step.tokens[served].astype(np.int32), device)
    if served.all():
        return Served(step.request_slots, None if order is None else to_device(order, device), new_tokens)
    tokens = np.flatnonzero(np.repeat(served, step.tokens))
    if order is not None:
        tokens = order[tokens]
    request_slots = step.request_slots[to_device(np.flatnonzero(served), device)]
    return Served(request_slots, to_device(tokens, device), new_tokens)


def _call(
    cache: PagedKVCache, step: Extension, requests: IntArray, width: int, order: IntArray | None
) -> Call:
    """A call of paged attention that serves some of the step's requests, whose widest table has so many pages."""
    tokens, request_slots, heads = step.tokens, step.request_slots, cache.num_kv_heads
    if len(requests) < len(tokens):
        request_slots = request_slots[to_device(requests, request_slots.device)]
    query_start_loc, gather = _query_order(tokens, requests, heads)
    if order is not None:
        in_step = np.arange(int(tokens.sum()) * heads) if gather is None else gather
        token, head = np.divmod(in_step, heads)
        gather = order[token] * heads + head
    return Call(
        seq_lens=cache.seq_lens(request_slots),
        block_tables=cache.tables.block_tables(request_slots, cache.num_layers, width),
        query_start_loc=to_device(query_start_loc, request_slots.device),
        longest=int(np.asarray(step.max_lens, np.int64)[requests].max()),
        longest_query=int(tokens[requests].max()),
        gather=None if gather is None else to_device(gather, request_slots.device),
    )


def _entry_slots(cache: PagedKVCache, step: Extension, num_tokens: int, order: IntArray | None) -> Tensor:
    """Where the batch's new entries go, as of :attr:`Batch.entry_slots`."""
    placed = cache.entry_slots(step)
    if order is None:
        return placed
    layers, heads = cache.num_layers, cache.num_kv_heads
    in_batch = placed.new_full((layers, num_tokens, heads), -1)
    in_batch.index_copy_(1, to_device(order, placed.device), placed.view(layers, len(order), heads))
    return in_batch.flatten(1)


def _query_order(
    tokens: IntArray, requests: IntArray, heads: int
) -> tuple[NDArray[np.int32], IntArray | None]:
    """``query_start_loc`` and ``gather`` of a call that serves some requests of a batch."""
    per_sequence = np.repeat(tokens[requests], heads)
    ends = per_sequence.cumsum()
    query_start_loc = np.concatenate([[0], ends]).astype(np.int32)
    if len(requests) == len(tokens) == tokens.sum():
        return query_start_loc, None
    starts = (tokens.cumsum() - tokens)[requests]
    first = (starts[:, None] * heads + np.arange(heads)).ravel()
    token = np.arange(ends[-1]) - np.repeat(ends - per_sequence, per_sequence)
    return query_start_loc, np.repeat(first, per_sequence) + token * heads


def _calls(tokens: IntArray, widths: IntArray, requests: IntArray) -> list[IntArray]:
    """The given requests, those of each call: decodes apart from prefills, and narrow ones from wide ones."""
    kinds = (requests[tokens[requests] == 1], requests[tokens[requests] > 1])
    return [kind[part] for kind in kinds if kind.size for part in split_by_width(widths[kind])]


def split_by_width(widths: IntArray) -> list[IntArray]:
    """Split a batch into at most two calls, so that narrow tables are not padded to the widest.

    Args:
        widths: pages of each request's longest row.

    Returns:
        Indices of the requests of each call, ascending; one call unless a second at least halves the tables.
    """
    order = np.argsort(-widths, kind="stable")
    falling = widths[order]
    wide = np.arange(1, len(widths))
    cells = falling[0] * wide + falling[1:] * (len(widths) - wide)
    if not cells.size or 2 * cells.min() > falling[0] * len(widths):
        return [np.arange(len(widths))]
    cut = int(wide[cells.argmin()])
    return [np.sort(order[:cut]), np.sort(order[cut:])]
