"""Prefixes that were compressed once and that further requests begin with: which there are, who uses them, who goes.

Only counts, as in the ledger: the pages are the workers', which know a prefix by its number.

    reading   a request was admitted that reads the prefix; others that begin with it wait for that
       |
    storing   the step that evicts it was dispatched; every rank keeps a run of what is left, and reports
       |
    ready     all ranks have reported; who begins with the prefix borrows its pages
       |
    dropped   its pages are needed, or the cache was reset; a single request that uses it keeps the pages
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import repeat_prompts_of
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.schedules.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prefix_key(
    request: "Request", plan: Plan, block_size: int, hash_function: Callable[[Any], bytes]
) -> Hashable | None:
    """What two requests must have in common for one to begin with what the other keeps of its prefix.

    That is how it is evicted, what the model is asked when it repeats it, and everything that vLLM's own prefix cache
    compares: tokens, prompt embeddings, ``cache_salt``, the LoRA adapter and images. vLLM hashes
    them block by block; what is left behind the last full block is hashed here likewise.

    Args:
        block_size: tokens of a block that vLLM has hashed.
        hash_function: as of ``--prefix-caching-hash-algo``.

    Returns:
        None if the request has no prefix that is evicted on its own, or vLLM has not hashed it.
    """
    tokens = plan.evict_at
    if tokens is None or tokens >= request.num_prompt_tokens:
        return None
    blocks = tokens // block_size
    if len(request.block_hashes) < blocks:
        return None
    last_block = request.block_hashes[blocks - 1] if blocks else None
    rest = request.all_token_ids[blocks * block_size : tokens]
    # Of no tokens as well: a request of one block more has another key.
    extra_keys, _ = generate_block_hash_extra_keys(request, blocks * block_size, tokens, 0)
    key = hash_block_tokens(hash_function, last_block, rest, extra_keys), tokens, plan.config
    prompts = repeat_prompts_of(request.sampling_params)
    return key if prompts is None else (*key, prompts)


@dataclass(eq=False)
class Prefix:
    """A prefix that is cached, or is going to be.

    Attributes:
        number: what scheduler and workers call it.
        key: as of :func:`prefix_key`.
        tokens: of the prefix.
        producer: id and epoch of the request that reads it.
        held: pages of each rank that it holds.
        kept: for each rank that has reported, the page count of a request that holds this prefix, as if it borrowed
            nothing.
        full_pages: those of each rank that are full, which all of its borrowers use.
        borrowers: ids of the requests that use them.
        is_storing: whether the step that evicts it was dispatched.
        is_forgotten: whether no further request may begin with it.
    """

    number: int
    key: Hashable
    tokens: int
    producer: tuple[str, int]
    held: list[int]
    kept: dict[int, PageCount] = field(default_factory=dict)
    full_pages: list[int] = field(default_factory=list)
    borrowers: set[str] = field(default_factory=set)
    is_storing: bool = False
    is_forgotten: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether every rank has stored it."""
        return len(self.kept) == len(self.held)

    @property
    def is_borrowed(self) -> bool:
        """Whether requests use pages of it: not if they have copied all of them, since none is full."""
        return bool(self.borrowers) and any(self.full_pages)

    @property
    def num_users(self) -> int:
        """How many requests use pages of it."""
        return len(self.borrowers) if self.is_borrowed else 0

    def freed(self, rank: int) -> int:
        """Pages of a rank that are free once it is dropped; what a single borrower uses becomes that one's own."""
        return self.held[rank] - (self.full_pages[rank] if self.borrowers else 0)


class PrefixCache:
    """All prefixes of a server.

    Args:
        num_ranks: ranks that report.
        most: how many may be storing or ready at once.
        next_number: gives numbers that nothing else on the workers has.
        outbox: where the workers are told what to store and to drop.

    Attributes:
        held: pages of each rank that prefixes hold.
    """

    def __init__(self, num_ranks: int, most: int, next_number: Callable[[], int], outbox: Outbox):
        self.most = most
        self._next_number, self.outbox = next_number, outbox
        self.held = [0] * num_ranks
        self._dropped = 0
        self._by_key: dict[Hashable, Prefix] = {}
        self._by_producer: dict[tuple[str, int], Prefix] = {}
        self._stored: dict[int, Prefix] = {}
        """Those that are storing or ready by number, the least recently used first."""
        # Of these there are few, also where thousands are cached: whatever is asked in every step looks at them alone.
        self._borrowed: dict[int, Prefix] = {}
        self._forgotten: dict[int, Prefix] = {}

    def __len__(self) -> int:
        """How many are ready, also those that no further request may begin with."""
        return len(self._stored) - len(self._storing)

    @property
    def _storing(self) -> list[Prefix]:
        return [prefix for prefix in self._by_producer.values() if prefix.is_storing]

    @property
    def is_full(self) -> bool:
        """Whether there may be no further one."""
        return len(self._stored) >= self.most

    @property
    def all_stored(self) -> list[Prefix]:
        """Those that are storing or ready."""
        return list(self._stored.values())

    @property
    def awaits_reports(self) -> bool:
        """Whether some are storing."""
        return bool(self._storing)

    def find(self, key: Hashable | None) -> Prefix | None:
        """The prefix with this key, if requests may begin with it or wait for it. Changes nothing."""
        return self._by_key.get(key)

    def touch(self, prefix: Prefix) -> None:
        """A prefix that is ready counts as used now, also by those who wait for something else. Modifies the order."""
        self._stored[prefix.number] = self._stored.pop(prefix.number)

    # From reading to ready.

    def begin(self, key: Hashable, tokens: int, producer: tuple[str, int]) -> None:
        """A request was admitted that reads a prefix of so many tokens which is not known yet."""
        prefix = Prefix(self._next_number(), key, tokens, producer, [0] * len(self.held))
        self._by_key[key] = self._by_producer[producer] = prefix

    def produced_by(self, producer: tuple[str, int]) -> Prefix | None:
        """What an admission of a request reads or stores, None if that is no prefix or it is ready."""
        return self._by_producer.get(producer)

    def store(self, prefix: Prefix, pages: Sequence[int]) -> None:
        """The step that is being scheduled evicts a prefix.

        Args:
            pages: to be held on each rank until its report, for copies of pages that are not full.
        """
        prefix.is_storing = True
        self._stored[prefix.number] = prefix
        self.outbox.store(prefix.producer[0], prefix.number)
        self.set_held(prefix, pages)

    def on_report(self, prefix: Prefix, rank: int, count: PageCount, partial_pages: int) -> None:
        """A rank has stored a prefix.

        Args:
            count: of what it keeps.
            partial_pages: its pages that are not full, which each borrower copies.
        """
        prefix.kept[rank] = count
        prefix.full_pages = prefix.full_pages or [0] * len(self.held)
        prefix.full_pages[rank] = count.pages - partial_pages
        self.set_held(
            prefix, [count.pages if index == rank else held for index, held in enumerate(prefix.held)]
        )
        if prefix.is_ready:
            del self._by_producer[prefix.producer]

    def cancel(self, prefix: Prefix) -> None:
        """A prefix will not be stored after all; who waits for it need not any more."""
        del self._by_producer[prefix.producer]
        self._remove(prefix)

    def set_held(self, prefix: Prefix, pages: Sequence[int]) -> None:
        """A prefix now holds so many pages of each rank."""
        for rank, held in enumerate(pages):
            self.held[rank] += held - prefix.held[rank]
        prefix.held = list(pages)

    # From ready to dropped.

    def borrow(self, prefix: Prefix, request_id: str) -> None:
        """A request uses pages of a prefix."""
        prefix.borrowers.add(request_id)
        self._borrowed[prefix.number] = prefix

    def give_back(self, prefix: Prefix, request_id: str) -> None:
        """A request does not use a prefix any more."""
        prefix.borrowers.discard(request_id)
        if not prefix.borrowers:
            self._borrowed.pop(prefix.number, None)

    def droppable(self, busy: Collection[str], forgotten: bool = False) -> Iterator[Prefix]:
        """Prefixes that may be dropped: at first those that nobody borrows, then those that one request does.

        The least recently used come first. None goes that a request of ``busy``, just admitted, begins with.

        Args:
            forgotten: only those that no further request may begin with.
        """
        prefixes = self._forgotten if forgotten else self._stored
        for borrowers in (0, 1):
            for prefix in prefixes.values():
                if prefix.num_users == borrowers and self._may_drop(prefix, busy):
                    yield prefix

    def _may_drop(self, prefix: Prefix, busy: Collection[str]) -> bool:
        return prefix.is_ready and prefix.num_users <= 1 and prefix.borrowers.isdisjoint(busy)

    def droppable_pages(self, busy: Collection[str], untouchable: Prefix | None = None) -> list[int]:
        """Pages of each rank that are free once all prefixes are dropped that may be, apart from one."""
        pages = list(self.held)
        for prefix in {*self._borrowed.values(), *self._storing, *([untouchable] if untouchable else [])}:
            goes = prefix is not untouchable and self._may_drop(prefix, busy)
            for rank, held in enumerate(prefix.held):
                pages[rank] -= held - (prefix.freed(rank) if goes else 0)
        return pages

    def drop(self, prefix: Prefix) -> None:
        """The workers drop a prefix before the next step."""
        self.outbox.drop(prefix.number)
        self._dropped += not prefix.is_forgotten
        self._remove(prefix)

    def take_dropped(self) -> int:
        """How many were dropped to make room since the last call; those of a reset do not count."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _remove(self, prefix: Prefix) -> None:
        self.set_held(prefix, [0] * len(self.held))
        for prefixes in (self._stored, self._borrowed, self._forgotten):
            prefixes.pop(prefix.number, None)
        if not prefix.is_forgotten:
            del self._by_key[prefix.key]

    def forget(self) -> None:
        """No further request begins with what is cached, or waits for what is being read or stored."""
        for prefix in list(self._by_key.values()):
            if not prefix.is_storing:
                self.cancel(prefix)
                continue
            prefix.is_forgotten = True
            self._forgotten[prefix.number] = prefix
        self._by_key.clear()

    # What they hold.

    def pinned(self, more: Prefix | None = None) -> list[int]:
        """Pages of each rank that are not counted as any borrower's and that no drop would free.

        Args:
            more: one that a further request would borrow.
        """
        pages = [0] * len(self.held)
        for prefix in {*self._borrowed.values(), *([more] if more else [])}:
            is_shared = any(prefix.full_pages) and len(prefix.borrowers) + (prefix is more) > 1
            held = prefix.held if is_shared else prefix.full_pages
            pages = [sum(pair) for pair in zip(pages, held, strict=True)]
        return pages

    def in_use(self) -> list[int]:
        """Pages of each rank in prefixes that requests borrow or that are being stored."""
        used = [prefix.held for prefix in {*self._borrowed.values(), *self._storing}]
        return [sum(pages) for pages in zip(*used, strict=True)] or [0] * len(self.held)
