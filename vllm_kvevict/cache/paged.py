"""The paged KV cache of one worker rank: what the engine uses.

Owns the request slots, and checks what it is asked for. A row has exactly ceil(kv_len / page_size) pages, those that it
borrows among them, and host and device agree on every kv_len.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_kvevict.cache import growth
from vllm_kvevict.cache.compaction import compact
from vllm_kvevict.cache.format import PageMemory
from vllm_kvevict.cache.lengths import IntArray, RowLengths
from vllm_kvevict.cache.loans import Loan, Loans
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.reading import read_behind, read_columns, read_last
from vllm_kvevict.cache.rows import RowTables
from vllm_kvevict.cache.steps import Extension, Settled, to_device
from vllm_kvevict.cache.tables import PageTables


class PagedKVCache:
    """The entries of all requests, in pages over memory that somebody else allocated.

    A page holds ``page_size`` entries of one KV head of one layer. Rows are equally long until the first
    :meth:`compact`; every token adds one entry to each row of its request.

    Nothing here waits for the device, except :meth:`verify` and :meth:`remove_pages`.

    Args:
        memory: the pages; its layout says how many rows a layer has.
        num_layers: of this rank.
        max_requests: how many requests may be open at once.
        triton: whether Triton's kernels serve decode steps and compactions; they need a GPU, or Triton's interpreter,
            and pages whose keys and values are [page_size, head_dim] each.
        is_empty: whether no page may be used before :meth:`add_pages`.
    """

    def __init__(
        self,
        memory: PageMemory,
        *,
        num_layers: int,
        max_requests: int,
        triton: bool = False,
        is_empty: bool = False,
    ) -> None:
        layout, storage = memory.layout, memory.storage
        self.memory, self.storage, self.device = memory, storage, storage.device
        self.num_layers, self.num_kv_heads = num_layers, layout.rows
        self.page_size, self.head_dim = layout.page_size, layout["key"].numbers
        self.pool = PagePool(len(storage), self.device, is_empty)
        self.tables = PageTables(max_requests, num_layers * layout.rows, self.device)
        self.lengths = RowLengths(max_requests, num_layers, layout.rows, layout.page_size)
        self.rows = RowTables(memory, self.pool, self.tables, self.lengths)
        self.loans = Loans(self.rows)
        self.uses_triton = triton
        self._closed = list(range(max_requests - 1, -1, -1))
        self._is_open = np.zeros(max_requests, bool)

    def add_pages(self, pages: torch.Tensor) -> None:
        """Use more of the storage: int64 [N], pages that are not in use."""
        self.pool.add(pages)

    def remove_pages(self, pages: torch.Tensor) -> None:
        """Use less of the storage: what these pages hold moves to others, and the tables follow (waits for the device).

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
        to = self.pool.allocate_stretch(held.numel()).to(torch.int64)
        self.memory.move_pages(held, to)
        moved = torch.arange(self.storage.shape[0], dtype=torch.int32, device=self.device)
        moved[held] = to.to(torch.int32)
        self.tables.arena.copy_(moved[self.tables.arena])
        self.loans.relocate(moved)
        self.pool.free(held.to(torch.int32))
        self.pool.remove(held)

    def open(self, shared: Sequence[Loan] = (), tail: int | None = None) -> int:
        """Start a request without tokens, or with shared entries as of :meth:`Loans.begin`, and return its slot.

        Raises:
            ValueError: there is no such shared entry, or one does not follow the one before it.
            RuntimeError: max_requests are open, or the pool has too few free pages.
        """
        if not self._closed:
            raise RuntimeError(f"all {len(self._is_open)} request slots are in use")
        request_slot = self._closed[-1]
        if shared:
            self.loans.begin(request_slot, shared, tail)
        self._is_open[self._closed.pop()] = True
        return request_slot

    def close(self, request_slots: Sequence[int]) -> None:
        """End requests and free all they hold. Raises ValueError, and does nothing, if one is not open."""
        which = self._opened(request_slots)
        for request_slot in request_slots:
            if self.lengths.pages[request_slot]:
                self.pool.free(self.loans.owned_pages(request_slot))
                self.loans.end(request_slot)
            self.lengths.clear(request_slot)
            self._closed.append(request_slot)
        self._is_open[which] = False
        self.tables.release(which)

    def extend(self, request_slots: Sequence[int], new_tokens: Sequence[int]) -> Extension:
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
        self.tables.make_room(which, -(-max_lens // self.page_size))

        batch = to_device(which, self.device)
        growth.grow(self.rows, batch, tokens, pages, partial, self.uses_triton)
        self.lengths.append(which, tokens, pages)
        return Extension(batch, tokens, max_lens.tolist())

    def announce(self, request_slot: int, tokens: int) -> None:
        """Begin a request whose layers get room for its first tokens one by one: :meth:`fill`, or :meth:`expect`.

        Raises:
            ValueError: the request slot is not open or not empty.
        """
        if self.lengths.of(request_slot).any():
            raise ValueError(f"request slot {request_slot} is not empty")
        self.tables.make_room(self._opened([request_slot]), np.array([-(-tokens // self.page_size)]))
        self.lengths.announce(request_slot, tokens)

    def fill(self, request_slot: int, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room in one layer, still empty, for the T tokens with which a request was announced.

        Returns:
            int64 [T * H], places of the entries as of :meth:`entry_slots`; int32 [H, pages], their page table.

        Raises:
            RuntimeError: the pool has too few free pages.
        """
        return growth.fill(self.rows, request_slot, self._of_layer(layer), tokens)

    def expect(self, request_slot: int, layer: int, tokens: int) -> None:
        """Instead of :meth:`fill`: count the tokens in a layer although it has no page before :meth:`store`."""
        growth.expect(self.rows, request_slot, self._of_layer(layer), tokens)

    def store(
        self,
        request_slot: int,
        layer: int,
        entries: Mapping[str, torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> int:
        """Instead of :meth:`compact`: store what stays of the tokens that a layer expects.

        Args:
            entries: of all of them, by the names of their fields, [T, H, numbers] each.
            kept: as there; returns and raises as there: the pages are those that the others would have taken.
        """
        chosen = growth.fill_chosen(self.rows, request_slot, self._of_layer(layer), kept)
        stored = {name: numbers[chosen.token, chosen.row] for name, numbers in entries.items()}
        self.memory.write(stored, chosen.place)
        return chosen.spared

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

    def entry_slots(self, step: Extension) -> torch.Tensor:
        """Where a step's entries go, while no later step and no compaction has changed its rows. T tokens.

        Returns:
            int64 [L, T * H], contiguous: page * page_size + place in the page of each entry, token by token in
            the order of the batch, then head by head, as keys and values come out of a projection.
        """
        return growth.entry_slots(self.rows, step, self.num_layers, self.num_kv_heads)

    def read(self, name: str, request_slot: int, layer: int, n: int, first: int = 0) -> torch.Tensor:
        """A field of the first ``n`` entries of each head without those before ``first``, [H, n - first, numbers].

        Raises ValueError if a head holds fewer.
        """
        if n > (shortest := self.lengths.shortest(request_slot, layer)):
            raise ValueError(f"{n} entries were asked of heads of which one holds {shortest}")
        return read_columns(self.rows, name, self.table(request_slot, layer), first, n)

    def read_last(self, name: str, request_slot: int, layer: int, counts: IntArray) -> torch.Tensor:
        """A field of each head's last counts[h] entries, int64 [H], [H, max(counts), numbers], right-aligned.

        What is before them is zero. Raises ValueError if a head holds fewer, or there is not one count for each.
        """
        return read_last(self.rows, name, request_slot, self._of_layer(layer), counts)

    def read_behind(
        self, name: str, request_slot: int, layer: int, first: IntArray, counts: IntArray
    ) -> torch.Tensor:
        """A field of counts[h] entries of each head from entry first[h] on, int64 [H], [H, max(counts), numbers].

        What is behind a head's is arbitrary. Raises ValueError if a head holds fewer.
        """
        return read_behind(self.rows, name, request_slot, self._of_layer(layer), first, counts)

    def compact(
        self, request_slot: int, layer: int, kept: Sequence[torch.Tensor], first: IntArray | None = None
    ) -> int:
        """Keep only some entries of layers: move them to the front of each row's own pages and free the rest.

        Where entries of pages that a request borrows are chosen among, those pages stay as they are: their layer gets
        new pages with copies, from the page of entry first[r] on, and borrows those before it only.

        Args:
            request_slot: an open request.
            layer: the first of the layers, all of which are full.
            kept: for each KV head, layer after layer, the entries to keep, int64, strictly ascending, at least one.
                The values are not checked.
            first: int64, for each of ``kept``, how many entries at the front of the row stay where they are. Then
                kept[r] counts from entry first[r] on, and may be empty where first[r] > 0.

        Returns:
            Pages that the request uses less.

        Raises:
            ValueError: not one tensor per head of each layer, or a head keeps none or more than it holds.
            RuntimeError: the pool has too few free pages for copies of a layer; those before it are done.
        """
        heads, triton = self.num_kv_heads, self.uses_triton
        return compact(self.rows, self.loans, request_slot, layer * heads, kept, heads, triton, first)

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
            borrowed = self.loans.columns[request_slot] * self.page_size
            own = int((self.lengths.of(request_slot).ravel() - borrowed).min())
            if not 0 <= count <= own:
                raise ValueError(
                    f"request slot {request_slot} cannot drop {count} tokens: a row has {own} of its own"
                )
        growth.drop_newest(self.rows, which, fewer)

    def copy_entries(self, source: int, to: int, entries: torch.Tensor) -> None:
        """Begin an empty request with copies of some entries of another.

        Args:
            entries: int64 [rows, N] on the device, which entries of each row, or [1, N] of every row; below its
                kv_len.

        Raises:
            RuntimeError: the pool has too few free pages.
        """
        heads, count = self.num_kv_heads, entries.shape[1]
        self.extend([to], [count])
        head = torch.arange(heads, device=self.device).repeat_interleave(count)
        first = torch.arange(count, device=self.device).repeat(heads)
        of_rows = entries.expand(self.num_layers * heads, -1)
        for layer in range(self.num_layers):
            entry = of_rows[self._of_layer(layer)].flatten()
            places = self.rows.places(self.table(source, layer), head, entry)
            self.memory.move(places, self.rows.places(self.table(to, layer), head, first))

    def settle(self, request_slot: int) -> Settled:
        """After all layers of a request were compacted: shrink its page table and say what it holds."""
        longest = int(self.lengths.longest(np.array([request_slot]))[0])
        self.tables.shrink(request_slot, -(-longest // self.page_size))
        return Settled(
            self.held(request_slot), self.lengths.residues(request_slot), self.lengths.of(request_slot)
        )

    def held(self, request_slot: int) -> int:
        """Pages that a request holds, without those that it borrows."""
        return int(self.lengths.pages[request_slot]) - self.borrowed(request_slot)

    def borrowed(self, request_slot: int) -> int:
        """Pages that a request borrows."""
        return int(self.loans.columns[request_slot].sum())

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self.pool.num_free

    @property
    def physical_pages(self) -> int:
        """Pages that open requests and shared entries hold."""
        return self.pool.num_pages - self.pool.num_free

    def verify(self) -> None:
        """Raise RuntimeError if a page is owned twice or lost, or if host and device disagree (waits)."""
        self.pool.verify()
        lengths = self.lengths.of_all()
        differs = (self.tables.kv_len.cpu().numpy() != lengths).any(1)
        if differs.any():
            raise RuntimeError(f"kv_len of request slot {differs.argmax()} differs between host and device")
        wrong = self.rows.pages_for(lengths).sum(1) != self.lengths.pages
        if wrong.any():
            raise RuntimeError(
                f"request slot {wrong.argmax()} does not have ceil(kv_len / page_size) pages a row"
            )
        self.loans.verify()
        if not torch.equal(self.loans.owners(), self.pool.owners.clamp(min=0).to(torch.int64)):
            raise RuntimeError("the page tables do not hold exactly the pages that are taken from the pool")

    def table(self, request_slot: int, layer: int) -> torch.Tensor:
        """A request's pages in one layer, int32 [H, columns]; behind a row's own pages it is arbitrary."""
        return self.tables.region(request_slot)[self._of_layer(layer)]

    def _of_layer(self, layer: int) -> slice:
        return slice(layer * self.num_kv_heads, (layer + 1) * self.num_kv_heads)

    def _opened(self, request_slots: Sequence[int]) -> IntArray:
        which = np.asarray(request_slots, np.int64)
        if len(set(request_slots)) != which.size or not self._is_open[which].all():
            raise ValueError(f"request slots must be open and distinct, got {list(request_slots)}")
        return which
