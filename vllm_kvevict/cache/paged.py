"""The paged KV cache of one worker rank: what the engine uses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_kvevict.cache.layout import PageLayout, Write
from vllm_kvevict.cache.lengths import IntArray, RowLengths
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.steps import Settled, Step, to_device
from vllm_kvevict.cache.tables import SEGMENTS, PageTables


class PagedKVCache:
    """Keys and values of all requests, in pages over memory that somebody else allocated.

    A page holds ``page_size`` entries of one KV head of one layer. A row, one (layer, KV head) of a request,
    holds exactly ceil(kv_len / page_size) pages. Rows are equally long until the first :meth:`compact`; every
    token adds one entry to each row of its request.

    Nothing here waits for the device, except :meth:`verify`, :meth:`own_pages` and :meth:`remove_pages`.

    Args:
        storage: [num_pages, 2 * page_size * head_dim], contiguous; a page is its keys, then its values.
        num_layers, num_kv_heads: of this rank.
        page_size: entries per page, a multiple of 16.
        max_requests: how many requests may be open at once.
        write: stores entries into the storage, see :data:`vllm_kvevict.cache.layout.Write`.
        triton: whether Triton's kernels serve decode steps and compactions; they need a GPU, or Triton's interpreter,
            and pages whose keys and values are [page_size, head_dim] each.
        is_empty: whether no page of the storage may be used before :meth:`add_pages`.

    Raises:
        ValueError: a size is not possible.
        RuntimeError: the order in which ``write`` stores a page cannot be read back.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        *,
        num_layers: int,
        num_kv_heads: int,
        page_size: int,
        max_requests: int,
        write: Write,
        triton: bool = False,
        is_empty: bool = False,
    ) -> None:
        if page_size < 16 or page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, got {page_size}")
        if storage.dim() != 2 or storage.shape[1] % (2 * page_size) or not storage.is_contiguous():
            raise ValueError(
                "storage must be contiguous and [num_pages, 2 * page_size * head_dim], got "
                f"{list(storage.shape)} for page_size {page_size}"
            )
        self.storage = storage
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = storage.shape[1] // (2 * page_size)
        self.device = storage.device
        self.layout = PageLayout.probe(write, page_size, self.head_dim, storage.dtype, self.device)
        self.pool = PagePool(storage.shape[0], self.device, is_empty)
        self.tables = PageTables(max_requests, num_layers * num_kv_heads, self.device)
        self.lengths = RowLengths(max_requests, num_layers, num_kv_heads, page_size)
        self._write = write
        self.uses_triton = triton
        self._keys = self.layout.key_view(storage)
        self._values = self.layout.value_view(storage)
        self._in_page = torch.arange(page_size, device=self.device)
        self._closed = list(range(max_requests - 1, -1, -1))
        self._is_open = np.zeros(max_requests, bool)

    def add_pages(self, pages: torch.Tensor) -> None:
        """Use more of the storage: int64 [N], pages that are not in use."""
        self.pool.add(pages)

    def remove_pages(self, pages: torch.Tensor) -> None:
        """Use less of the storage: what these pages hold moves to others, and the tables follow (waits for the device).

        Segments (:mod:`vllm_kvevict.cache.segments`) know pages beside the tables: there must be none.

        Args:
            pages: int64 [N], of those that were added.

        Raises:
            RuntimeError: fewer others are free than are needed; nothing has changed.
        """
        free = self.pool.num_free
        held = pages[self.pool.owners[pages] > 0]
        if free < pages.numel():
            raise RuntimeError(f"{pages.numel()} pages cannot be removed from the page pool: {free} are free")
        self.pool.remove(pages[self.pool.owners[pages] == 0])
        to = self.pool.take_run(held.numel()).to(torch.int64)
        self.storage[to] = self.storage[held]
        moved = torch.arange(self.storage.shape[0], dtype=torch.int32, device=self.device)
        moved[held] = to.to(torch.int32)
        self.tables.arena.copy_(moved[self.tables.arena])
        self.pool.give(held.to(torch.int32))
        self.pool.remove(held)

    def open(self) -> int:
        """Start a request without tokens. Returns its slot; raises RuntimeError if max_requests are open."""
        if not self._closed:
            raise RuntimeError(f"all {len(self._is_open)} request slots are in use")
        request_slot = self._closed.pop()
        self._is_open[request_slot] = True
        return request_slot

    def close(self, request_slots: Sequence[int]) -> None:
        """End requests and free all they hold. Raises ValueError, and does nothing, if one is not open."""
        which = self._opened(request_slots)
        for request_slot in request_slots:
            held = int(self.lengths.pages[request_slot])
            if held:
                table = self.tables.region(request_slot)
                own = self._own_columns(request_slot, table.shape[1])
                self.pool.give(table.flatten()[_where(own, held)])
            self.lengths.clear(request_slot)
            self._closed.append(request_slot)
        self._is_open[which] = False
        self.tables.release(which)

    def extend(self, request_slots: Sequence[int], new_tokens: Sequence[int]) -> Step:
        """Make room for new tokens in all layers and heads.

        Args:
            request_slots: the batch's requests, each at most once.
            new_tokens: how many tokens each of them adds, at least 1.

        Raises:
            ValueError: a request slot is not open or occurs twice, or a count is below 1.
            RuntimeError: the pool has too few free pages. In both cases nothing has changed.
        """
        which, tokens = self._opened(request_slots), np.asarray(new_tokens, np.int64)
        if tokens.shape != which.shape or (tokens < 1).any():
            raise ValueError(
                f"new_tokens must be one positive count per request slot, got {list(new_tokens)}"
            )
        pages, partial = self.lengths.demand(which, tokens)
        self.pool.require(int(pages.sum()))
        max_lens = self.lengths.longest(which) + tokens
        self.tables.reserve(which, -(-max_lens // self.page_size))

        batch = to_device(which, self.device)
        decodes = np.flatnonzero(tokens == 1)
        if decodes.size == which.size:
            self._append_one(batch, pages, partial)
        else:
            if decodes.size:
                self._append_one(batch[to_device(decodes, self.device)], pages[decodes], partial[decodes])
            for i in np.flatnonzero(tokens > 1):
                self._append(batch[i : i + 1], int(tokens[i]), int(pages[i]), int(partial[i]))
        self.lengths.append(which, tokens, pages)
        return Step(batch, tokens, max_lens.tolist())

    def own_pages(self, request_slot: int) -> torch.Tensor:
        """Pages of a request that it does not borrow, int32 (waits for the device)."""
        return self._pages_of([request_slot])

    def _pages_of(self, request_slots: Sequence[int]) -> torch.Tensor:
        """Pages of requests that they do not borrow, one request after the other, int32 (waits for the device)."""
        which = torch.tensor(request_slots, dtype=torch.int64, device=self.device)
        borrowed = self.tables.borrowed[which].flatten()
        counts = (self._pages(self.tables.kv_len[which]).flatten() - borrowed).clamp(min=0)
        skipped = counts.cumsum(0) - counts
        first = self.tables.row_starts[which].flatten() + borrowed - skipped
        places = first.repeat_interleave(counts)
        return self.tables.pages_at(places + torch.arange(places.numel(), device=self.device))

    def _own_columns(self, request_slot: int, columns: int) -> torch.Tensor:
        """Which places of a request's page table hold pages of its own, bool [rows, columns]."""
        column = torch.arange(columns, device=self.device)
        used = self._pages(self.tables.kv_len[request_slot])[:, None]
        return (column >= self.tables.borrowed[request_slot][:, None]) & (column < used)

    def announce(self, request_slot: int, tokens: int) -> None:
        """Begin a request whose layers get room for its first tokens one by one, each by :meth:`fill`.

        Raises:
            ValueError: the request slot is not open or not empty.
        """
        if self.lengths.of(request_slot).any():
            raise ValueError(f"request slot {request_slot} is not empty")
        self.tables.reserve(self._opened([request_slot]), np.array([-(-tokens // self.page_size)]))
        self.lengths.announce(request_slot, tokens)

    def fill(self, request_slot: int, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room in one layer, still empty, for the T tokens with which a request was announced.

        Returns:
            int64 [T * H], places of the entries as of :meth:`entry_slots`; int32 [H, pages], their page table.

        Raises:
            RuntimeError: the pool has too few free pages.
        """
        heads, size = self.num_kv_heads, self.page_size
        columns = -(-tokens // size)
        self.table(request_slot, layer)[:, :columns] = pages = self.pool.take_run(heads * columns).view(
            heads, -1
        )
        if tokens % size:
            self.storage.index_fill_(0, pages[:, -1].to(torch.int64), 0)
        self.tables.kv_len[request_slot, layer * heads : (layer + 1) * heads] = tokens
        self.lengths.replace(request_slot, layer, np.full(heads, tokens))
        entry = torch.arange(tokens, device=self.device)
        places = pages.to(torch.int64)[:, entry // size].mul_(size).add_(entry % size)
        return places.t().flatten(), pages

    def seq_lens(self, request_slots: torch.Tensor) -> torch.Tensor:
        """kv_len of all rows of some requests.

        Args:
            request_slots: int64 [B] on the device: a step's request slots or some of them.

        Returns:
            int32 [L, B * H], contiguous.
        """
        kv_len = self.tables.kv_len.index_select(0, request_slots)
        by_layer = kv_len.view(len(request_slots), self.num_layers, self.num_kv_heads).transpose(0, 1)
        return by_layer.flatten(1).contiguous()  # with one head, flatten gives a view

    def entry_slots(self, step: Step) -> torch.Tensor:
        """Where a step's entries go, while no later step and no compaction has changed its rows. T tokens.

        Returns:
            int64 [L, T * H], contiguous: page * page_size + place in the page of each entry, token by token in
            the order of the batch, then head by head, as keys and values come out of a projection.
        """
        heads, tokens = self.num_kv_heads, step.tokens
        if (tokens == 1).all():
            return self._new_entries(step.request_slots, 1).flatten(1).contiguous()
        result = torch.empty(
            self.num_layers, int(tokens.sum()) * heads, dtype=torch.int64, device=self.device
        )
        first = (tokens.cumsum() - tokens) * heads
        decodes = np.flatnonzero(tokens == 1)
        if decodes.size:
            at = to_device((first[decodes, None] + np.arange(heads)).ravel(), self.device)
            result[:, at] = self._new_entries(step.request_slots[to_device(decodes, self.device)], 1).flatten(
                1
            )
        for i in np.flatnonzero(tokens > 1):
            placed = self._new_entries(step.request_slots[i : i + 1], int(tokens[i]))
            result[:, first[i] : first[i] + int(tokens[i]) * heads] = placed.flatten(1)
        return result

    def block_tables(self, request_slots: torch.Tensor, width: int) -> torch.Tensor:
        """Pages of all layers' rows: one pass a step, since a compaction only shortens rows.

        Args:
            request_slots: int64 [B] on the device: a step's request slots or some of them.
            width: columns of the result.

        Returns:
            int32 [L, B * H, width]. What follows a row's own pages is arbitrary, but valid page ids.
        """
        return self.tables.block_tables(request_slots, self.num_layers, width)

    def read_keys(self, request_slot: int, layer: int, n: int, first: int = 0) -> torch.Tensor:
        """The first ``n`` keys of each head without those before ``first``, [H, n - first, head_dim].

        Raises ValueError if a head holds fewer.
        """
        skipped = first // self.page_size
        pages = self._first_pages(request_slot, layer, n)[:, skipped:]
        keys = self.layout.keys.read(self._keys, pages, self._in_page).flatten(1, 2)
        return keys[:, first - skipped * self.page_size : n - skipped * self.page_size]

    def read_values(self, request_slot: int, layer: int, n: int) -> torch.Tensor:
        """The first ``n`` values of each head, [H, n, head_dim]. Raises ValueError if a head holds fewer."""
        pages = self._first_pages(request_slot, layer, n)
        return self.layout.values.read(self._values, pages, self._in_page).flatten(1, 2)[:, :n]

    def read_keys_at(self, request_slot: int, layer: int, entries: torch.Tensor) -> torch.Tensor:
        """The keys at some entries of each head, [H, N, head_dim].

        Args:
            entries: int64 [N] on the device; below every head's kv_len.
        """
        pages = self.table(request_slot, layer)[:, entries // self.page_size]
        return self.layout.keys.read(self._keys, pages, entries % self.page_size)

    def gather(
        self, request_slot: int, layer: int, heads: torch.Tensor, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [N, head_dim], of the given entries of the given heads, both int64 [N].

        Entries must lie below the kv_len of their head; this is not checked.
        """
        return self._gather(self.table(request_slot, layer), heads, entries)

    def _gather(
        self, table: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = table[rows, entries // self.page_size]
        tokens = entries % self.page_size
        keys = self.layout.keys.read(self._keys, pages, tokens)
        return keys, self.layout.values.read(self._values, pages, tokens)

    def compact(self, request_slot: int, layer: int, kept: Sequence[torch.Tensor]) -> int:
        """Keep only some entries of layers: move them to the front of each row's own pages and free the rest.

        Where segments lend the first pages, they are copied to new pages instead: those of the segments stay as they
        are, and the layers borrow nothing any more.

        Args:
            request_slot: an open request.
            layer: the first of the layers, all of which are full.
            kept: for each KV head, layer after layer, the entries to keep, int64, strictly ascending, at least one.
                The values are not checked.

        Returns:
            Pages that the request uses less.

        Raises:
            ValueError: not one tensor per head of each layer, or a head keeps none or more than it holds; or the
                request borrows pages of a run.
            RuntimeError: the pool has too few free pages for copies.
        """
        if self.tables.lenders[request_slot] >= 0:
            raise ValueError(f"request slot {request_slot} borrows pages of a run, which cannot be compacted")
        layers = slice(layer, layer - -len(kept) // self.num_kv_heads)
        before = self.lengths.of(request_slot)[layers].ravel()
        after = np.array([entries.numel() for entries in kept], np.int64)
        if not kept or after.shape != before.shape or (after < 1).any() or (after > before).any():
            raise ValueError(f"cannot keep {after.tolist()} of {before.tolist()} entries per KV head")
        if self.tables.lenders[request_slot] == SEGMENTS:
            return self._copy_out(request_slot, layer, kept, after)
        if (after == before).all():
            return 0
        first = layer * self.num_kv_heads
        table = self.tables.region(request_slot)[first : first + len(kept)]
        counts = to_device(after, self.device)
        self._move(table, torch.cat(list(kept)), counts, int(after.sum()))
        kv_len = self.tables.kv_len[request_slot, first : first + len(kept)]
        freed = self.lengths.replace(request_slot, layer, after)
        if freed:
            column = torch.arange(table.shape[1], device=self.device)
            behind = column >= self._pages(counts)[:, None]
            behind &= column < self._pages(kv_len)[:, None]
            self.pool.give(table.flatten()[_where(behind, freed)])
        kv_len.copy_(counts)
        return freed

    def _copy_out(self, request_slot: int, layer: int, kept: Sequence[torch.Tensor], after: IntArray) -> int:
        """Copy kept entries, after[r] of row r, to new pages of each row; layer by layer, so that little is in flight.

        Returns:
            Pages that the request uses less.
        """
        freed, heads = 0, self.num_kv_heads
        for start in range(0, len(kept), heads):
            part = slice(start, start + heads)
            freed += self._copy_out_layer(
                request_slot, layer + start // heads, torch.cat(list(kept[part])), after[part]
            )
        return freed

    def _copy_out_layer(self, request_slot: int, layer: int, kept: torch.Tensor, after: IntArray) -> int:
        rows = slice(layer * self.num_kv_heads, (layer + 1) * self.num_kv_heads)
        lent = self.tables.lent_columns[request_slot, rows].copy()
        before = -(-self.lengths.of(request_slot)[layer] // self.page_size)
        row, column, taken = self._take_rows(after)
        table, counts = self.table(request_slot, layer), to_device(after, self.device)
        places = torch.arange(len(kept), device=self.device)
        of_row = torch.arange(len(after), device=self.device).repeat_interleave(counts, output_size=len(kept))
        places -= (counts.cumsum(0) - counts)[of_row]
        keys, values = self._gather(table, of_row, kept)
        own = self._own_columns(request_slot, table.shape[1])[rows]
        given = table.flatten()[_where(own, int((before - lent).sum()))]
        table[row, column] = taken
        pages = table[of_row, places // self.page_size].to(torch.int64)
        self._write(self.storage, keys, values, pages * self.page_size + places % self.page_size)
        self.pool.give(given)
        self.tables.own(request_slot, rows)
        self.tables.kv_len[request_slot, rows] = counts.to(torch.int32)
        self.lengths.pages[request_slot] += lent.sum()
        return self.lengths.replace(request_slot, layer, after)

    def _take_rows(self, lengths: IntArray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take pages for rows of these lengths: the row and the column of each page, int64, and the pages."""
        widths = -(-lengths // self.page_size)
        row = np.repeat(np.arange(len(widths)), widths)
        column = np.arange(len(row)) - np.repeat(widths.cumsum() - widths, widths)
        taken = self.pool.take_run(len(row))
        ends_within = np.flatnonzero((column == (widths - 1)[row]) & (lengths % self.page_size > 0)[row])
        # What another request left behind the entries (inf or NaN) would spoil the attention.
        self.storage.index_fill_(0, taken[to_device(ends_within, self.device)].to(torch.int64), 0)
        return to_device(row, self.device), to_device(column, self.device), taken

    def _move(self, table: torch.Tensor, kept: torch.Tensor, counts: torch.Tensor, total: int) -> None:
        """Move kept entries, counts[r] of row r and ``total`` of all, to the front of the rows of ``table``."""
        if self.uses_triton:
            from vllm_kvevict.kernels.compact_rows import compact_rows

            compact_rows(self.storage, self.page_size, table, kept, pad(counts.cumsum(0), (1, 0)))
            return
        rows = torch.arange(len(table), device=self.device).repeat_interleave(counts, output_size=total)
        entries = torch.arange(total, device=self.device) - (counts.cumsum(0) - counts)[rows]
        # All is read before anything is written: a row's survivors move within its own pages.
        keys, values = self._gather(table, rows, kept)
        places = table[rows, entries // self.page_size].to(torch.int64) * self.page_size
        places += entries % self.page_size
        self._write(self.storage, keys, values, places)

    def truncate(self, request_slots: Sequence[int], dropped: Sequence[int]) -> None:
        """Drop the newest tokens of requests: as many entries of each of their rows.

        Args:
            request_slots: the requests, each at most once.
            dropped: how many tokens each of them drops.

        Raises:
            ValueError: a request slot is not open or occurs twice, or a row has not so many entries, or only in pages
                that it borrows. Nothing has changed.
        """
        which, fewer = self._opened(request_slots), np.asarray(dropped, np.int64)
        for request_slot, count in zip(request_slots, dropped, strict=True):
            self._check_truncation(request_slot, count)
        freed = self.lengths.truncate(which, fewer)
        batch = to_device(which, self.device)
        before = self.tables.kv_len.index_select(0, batch)
        after = before - to_device(fewer, self.device).to(torch.int32)[:, None]
        most = -(-int(fewer.max(initial=0)) // self.page_size)
        column = self._pages(after)[..., None] + torch.arange(most, dtype=torch.int32, device=self.device)
        behind = column < self._pages(before)[..., None]
        places = self.tables.row_starts.index_select(0, batch)[..., None] + column
        self.pool.give(self.tables.pages_at(places.flatten()[_where(behind, int(freed.sum()))]))
        self.tables.kv_len.index_copy_(0, batch, after)

    def _check_truncation(self, request_slot: int, dropped: int) -> None:
        """Raise ValueError unless a request can drop so many tokens."""
        lent = self.tables.lent_columns[request_slot] * self.page_size
        own = int((self.lengths.of(request_slot).ravel() - lent).min())
        if not 0 <= dropped <= own:
            raise ValueError(
                f"request slot {request_slot} cannot drop {dropped} tokens: a row has {own} of its own"
            )

    def copy_entries(self, source: int, to: int, entries: torch.Tensor) -> None:
        """Begin an empty request with copies of some entries of another.

        Args:
            entries: int64 [N] on the device, which entries of every row; below every row's kv_len.

        Raises:
            RuntimeError: the pool has too few free pages.
        """
        heads, count = self.num_kv_heads, len(entries)
        places = self.entry_slots(self.extend([to], [count]))
        head = torch.arange(heads, device=self.device).repeat(count)
        entry = entries.repeat_interleave(heads)
        for layer in range(self.num_layers):
            keys, values = self.gather(source, layer, head, entry)
            self._write(self.storage, keys, values, places[layer])

    def write(self, keys: torch.Tensor, values: torch.Tensor, entry_slots: torch.Tensor) -> None:
        """Store entries, each [N, head_dim], at places int64 [N] as of :meth:`entry_slots`."""
        self._write(self.storage, keys, values, entry_slots)

    def checksum(self, pages: torch.Tensor) -> int:
        """A number that changes when anything in pages (int32 [N]) does (waits for the device)."""
        words = self.storage[pages.to(torch.int64)].flatten().view(torch.int64)
        # By odd numbers, since products lose their highest bits: those of even ones would hide some changes.
        weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        return int(words.mul_(weights).sum())

    def settle(self, request_slot: int) -> Settled:
        """After all layers of a request were compacted: shrink its page table and say what it holds."""
        longest = int(self.lengths.longest(np.array([request_slot]))[0])
        self.tables.shrink(request_slot, -(-longest // self.page_size))
        return Settled(
            self.held(request_slot), self.lengths.residues(request_slot), self.lengths.of(request_slot)
        )

    def held(self, request_slot: int) -> int:
        """Pages that a request holds, without those that it borrows."""
        return int(self.lengths.pages[request_slot])

    def lent(self, request_slot: int) -> int:
        """Pages that a request borrows."""
        return int(self.tables.lent_columns[request_slot].sum())

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self.pool.num_free

    @property
    def physical_pages(self) -> int:
        """Pages that open requests, runs and segments hold."""
        return self.pool.num_pages - self.pool.num_free

    @property
    def stored_entries(self) -> int:
        """Entries that the open requests hold, over all layers and KV heads."""
        return self.lengths.total_entries

    def verify(self, elsewhere: torch.Tensor | None = None) -> None:
        """Raise RuntimeError if a page is owned twice or lost, or if host and device disagree (waits).

        Args:
            elsewhere: int32, pages that are in no request's table, those of segments.
        """
        self.pool.verify()
        lengths = self.lengths.of_all()
        differs = (self.tables.kv_len.cpu().numpy() != lengths).any(1)
        if differs.any():
            raise RuntimeError(f"kv_len of request slot {differs.argmax()} differs between host and device")
        borrowed = self.tables.borrowed.cpu().numpy()
        differs = (borrowed != self.tables.lent_columns).any(1)
        if differs.any():
            raise RuntimeError(
                f"what request slot {differs.argmax()} borrows differs between host and device"
            )
        pages = -(-lengths // self.page_size)
        wrong = (pages - borrowed).sum(1) != self.lengths.pages
        if wrong.any():
            raise RuntimeError(
                f"request slot {wrong.argmax()} does not hold ceil(kv_len / page_size) pages a row, but for those it "
                "borrows"
            )
        for slot in np.flatnonzero(self.tables.lenders >= 0):
            self._verify_borrowed(int(slot))
        self._verify_owned(elsewhere)

    def _verify_owned(self, elsewhere: torch.Tensor | None) -> None:
        """Each page that was taken is in the table of one owner."""
        owned = self._pages_of(np.flatnonzero(self.lengths.pages).tolist())
        if elsewhere is not None:
            owned = torch.cat([owned, elsewhere])
        times = torch.bincount(owned.cpu(), minlength=self.storage.shape[0])
        if not torch.equal(times, self.pool.owners.clamp(min=0).cpu().to(torch.int64)):
            raise RuntimeError("the page tables do not hold exactly the pages that are taken from the pool")

    def _verify_borrowed(self, request_slot: int) -> None:
        """What a request borrows is what its lender owns."""
        lender, borrowed = int(self.tables.lenders[request_slot]), self.tables.borrowed[request_slot]
        most = int(borrowed.max())
        table, lent = self.tables.region(request_slot)[:, :most], self.tables.region(lender)[:, :most]
        shared = torch.arange(most, device=self.device) < borrowed[:, None]
        owned = self._own_columns(lender, most)
        if not self._is_open[lender] or not ((table == lent) & owned)[shared].all():
            raise RuntimeError(
                f"request slot {request_slot} borrows pages that request slot {lender} does not own"
            )

    def _append_one(self, request_slots: torch.Tensor, pages: IntArray, partial: IntArray) -> None:
        """Add one entry to each row of requests (int64 [B]); ``pages`` and ``partial``, int64 [B], as of demand."""
        tables = self.tables
        if not self.uses_triton:
            self._append(request_slots, 1, int(pages.sum()), int(partial.sum()))
            return
        from vllm_kvevict.kernels.append_pages import append_pages

        taken, first = self.pool.take(int(pages.sum())), to_device(pages.cumsum() - pages, self.device)
        arguments = tables.arena, tables.row_starts, tables.kv_len, request_slots, taken, first
        append_pages(*arguments, self.page_size, self.storage)

    def _append(self, request_slots: torch.Tensor, tokens: int, pages: int, partial: int) -> None:
        """Add ``tokens`` entries to each row of ``request_slots`` (int64 [B]); ``pages`` and ``partial`` in total."""
        tables, size = self.tables, self.page_size
        before = tables.kv_len.index_select(0, request_slots)
        kv_len = before + tokens
        if pages:
            starts = tables.row_starts.index_select(0, request_slots)
            column = self._pages(before)[..., None]
            new = self._pages(kv_len)[..., None]
            if tokens > 1:
                # A row that ends within a page needs no more new ones than a row that ends with one.
                column = column + torch.arange(-(-tokens // size), dtype=torch.int32, device=self.device)
            taken = self.pool.take_run(pages) if tokens > 1 else self.pool.take(pages)
            tables.arena[(starts[..., None] + column).flatten()[_where(column < new, pages)]] = taken
            if partial < pages:
                # Some new pages become full, so tokens >= page_size and every row ends in a new page.
                ends = (starts + new[..., 0] - 1).flatten()[_where(kv_len % size > 0, partial)]
                taken = tables.pages_at(ends)
            # What another request left behind the new entries (inf or NaN) would spoil the attention.
            self.storage.index_fill_(0, taken.to(torch.int64), 0)
        tables.kv_len.index_copy_(0, request_slots, kv_len)

    def _new_entries(self, request_slots: torch.Tensor, tokens: int) -> torch.Tensor:
        """Places of the last ``tokens`` entries of each row of requests (int64 [B]), int64 [L, B, tokens, H]."""
        tables, size = self.tables, self.page_size
        kv_len = tables.kv_len.index_select(0, request_slots)[..., None]
        entry = kv_len + torch.arange(-tokens, 0, dtype=torch.int32, device=self.device)
        column = entry // size
        pages = tables.pages_at(tables.row_starts.index_select(0, request_slots)[..., None] + column)
        places = pages.to(torch.int64).mul_(size).add_(entry - column * size)
        return places.view(len(request_slots), self.num_layers, self.num_kv_heads, tokens).permute(1, 0, 3, 2)

    def _pages(self, lengths: torch.Tensor) -> torch.Tensor:
        return (lengths + (self.page_size - 1)) // self.page_size

    def table(self, request_slot: int, layer: int) -> torch.Tensor:
        """A request's pages in one layer, int32 [H, columns]; behind a row's own pages it is arbitrary."""
        return self.tables.region(request_slot)[layer * self.num_kv_heads : (layer + 1) * self.num_kv_heads]

    def _first_pages(self, request_slot: int, layer: int, n: int) -> torch.Tensor:
        """Pages of the first ``n`` entries of each head, [H, pages, 1]."""
        shortest = self.lengths.shortest(request_slot, layer)
        if n > shortest:
            raise ValueError(f"{n} entries were asked of heads of which one holds {shortest}")
        return self.table(request_slot, layer)[:, : -(-n // self.page_size), None]

    def _opened(self, request_slots: Sequence[int]) -> IntArray:
        which = np.asarray(request_slots, np.int64)
        if len(set(request_slots)) != which.size or not self._is_open[which].all():
            raise ValueError(f"request slots must be open and distinct, got {list(request_slots)}")
        return which


def _where(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Flat places of the ``count`` true elements; the count is given, so nothing waits for the device."""
    return torch.nonzero_static(mask.flatten(), size=count).flatten()
