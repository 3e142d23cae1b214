"""A compressed prefix, a tail behind one, and by what they are found.

:class:`vllm_kvevict.engine.scheduler.shared.compressed.CompressedPrefixes` owns all prefixes,
:class:`vllm_kvevict.engine.scheduler.shared.tails.Tails` all tails, and each alone writes to one.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import repeat_prompts_of
from vllm_kvevict.engine.scheduler.shared.entries import Entry
from vllm_kvevict.schedules.plan import Phase, Plan
from vllm_kvevict.schedules.registry import schedule_of

Keys = dict[int, Hashable]
"""By what each prefix of a request is found that is evicted on its own, by its tokens, the shortest first."""


def prefix_keys(request: Request, plan: Plan, block_size: int, hash_function: Callable[[Any], bytes]) -> Keys:
    """What two requests must have in common for one to begin with what the other keeps of a prefix.

    That is how it is evicted, in which parts, what the model is asked if it repeats them, and everything that vLLM's
    own prefix cache compares: tokens, prompt embeddings, ``cache_salt``, the LoRA adapter and images. vLLM hashes
    them block by block; what is left behind the last full block is hashed here likewise.

    Args:
        block_size: tokens of a block that vLLM has hashed.
        hash_function: as of ``--prefix-caching-hash-algo``.

    Returns:
        Of each part of the prompt, with all before it; none of one that ends with the prompt, or that vLLM has not
        hashed.
    """
    keys: Keys = {}
    before, prompts = None, repeat_prompts_of(request.sampling_params)
    words = None if prompts is None else prompts.to_lists()
    for part in plan.parts:
        if part.end >= request.num_prompt_tokens or len(request.block_hashes) < part.end // block_size:
            break
        tokens = _hash_of_tokens(request, part.end, block_size, hash_function)
        # A digest, so that keys of long chains are no larger than others.
        asked = words if schedule_of(part).repeats_prompt else None
        before = hash_function((before, tokens, *_how(part), asked))
        keys[part.end] = before
    return keys


def _how(part: Phase) -> tuple[Hashable, ...]:
    """Where a part of a prompt begins and ends, and how it is evicted."""
    config = part.config
    return part.begins, part.end, config.policy, config.budget, config.keep_ratio, config.items


def _hash_of_tokens(
    request: Request, tokens: int, block_size: int, hash_function: Callable[[Any], bytes]
) -> bytes:
    """Of all that vLLM's prefix cache compares of a request's first tokens."""
    blocks = tokens // block_size
    last_block = request.block_hashes[blocks - 1] if blocks else None
    rest = request.all_token_ids[blocks * block_size : tokens]
    # Of no tokens as well: a request of one block more has another key.
    extra_keys, _ = generate_block_hash_extra_keys(request, blocks * block_size, tokens, 0)
    return hash_block_tokens(hash_function, last_block, rest, extra_keys)


def next_key(
    request: Request, tokens: slice, before: Hashable, hash_function: Callable[[Any], bytes]
) -> Hashable:
    """By what some of a request's tokens are found behind all those before them.

    Args:
        before: by what those before them are found.
    """
    # Its salt and adapter are in the key of the prefix that comes before them all.
    extra_keys, _ = generate_block_hash_extra_keys(request, tokens.start, tokens.stop, 0)
    return hash_function((before, tuple(request.all_token_ids[tokens]), extra_keys))


@dataclass(frozen=True)
class Counted:
    """Pages of each rank of a prefix: which are nobody's own and no drop would free, which are in use, and which are
    free once all are dropped that may be."""

    pinned: list[int]
    used: list[int]
    freed: list[int]


@dataclass(eq=False)
class Prefix(Entry):
    """A prefix that is cached, or is going to be: what an eviction has left behind what its parent holds.

    Attributes:
        key: as of :func:`prefix_keys`.
        tokens: of the prefix.
        producer: id and epoch of the request that reads it.
        in_turns: whether that is a turn of a conversation.
        held: pages of each rank that it holds.
        parent: the prefix that this one follows, known when it is stored; None where it begins the prompt.
        children: how many follow it.
        fills: partial pages of its parent, of each rank, that are full with the beginning of this one.
        filled: its own partial pages of each rank that are full with what follows it.
        filled_by: those of its children that begin in these pages.
        filled_for: ids of requests that do, since the child is dropped with which they began; all are borrowers.
        kept: for each rank that has reported, the page count of a request that holds this prefix, as if it borrowed
            nothing.
        full_pages: its own of each rank that it fills itself, which all of its borrowers use.
        borrowers: ids of the requests that use them, and pages of no prefix that follows it.
        users: how many requests use them.
        storing: how many of itself and those that follow are being stored.
        is_shared: whether several requests use pages of it.
        shared: of how many of these that is so. None of them goes, nor what they follow.
        is_storing: whether the step that evicts it was dispatched.
        counted: what of it :class:`Totals` has added up.
    """

    key: Hashable
    tokens: int
    producer: tuple[str, int]
    in_turns: bool
    held: list[int]
    parent: "Prefix | None" = None
    children: int = 0
    fills: list[int] = field(init=False)
    filled: list[int] = field(init=False)
    filled_by: set["Prefix"] = field(default_factory=set)
    filled_for: set[str] = field(default_factory=set)
    kept: dict[int, PageCount] = field(default_factory=dict)
    full_pages: list[int] = field(default_factory=list)
    borrowers: set[str] = field(default_factory=set)
    refs: int = 0
    storing: int = 0
    is_shared: bool = False
    shared: int = 0
    is_storing: bool = False
    counted: "Counted" = field(init=False)

    def __post_init__(self) -> None:
        self.counted = Counted(*([0] * len(self.held) for _ in range(3)))
        self.fills, self.filled = [0] * len(self.held), [0] * len(self.held)

    def chain(self, until: "Prefix | None" = None) -> Iterator["Prefix"]:
        """This one, its parent and so on, up to the one before ``until``."""
        prefix: Prefix | None = self
        while prefix is not None and prefix is not until:
            yield prefix
            prefix = prefix.parent

    def follow(self, parent: "Prefix | None", name: str) -> "Prefix | None":
        """It is being stored for a request, behind another prefix.

        Returns:
            That one, if this one is to complete its partial pages: nobody does, or uses what is behind its own entries.
        """
        self.parent, self.is_storing = parent, True
        if parent is None:
            return None
        parent.count(children=1)
        may_complete = not parent.filled_by and not parent.filled_for
        if may_complete:
            parent.be_filled([0] * len(self.held))
        elif name in parent.filled_for:
            self.fills = list(parent.filled)
        else:
            return None
        parent.filled_by.add(self)
        return parent if may_complete else None

    def leave_parent(self) -> None:
        """It is gone."""
        if self.parent is not None:
            self.parent.count(children=-1)
            self.parent.filled_by.discard(self)

    def count(self, users: int = 0, storing: int = 0, shared: int = 0, children: int = 0) -> None:
        """So many more, or fewer, requests use it, of it and those that follow are being stored and are shared, and
        follow it."""
        self.refs += users
        self.children += children
        self.storing += storing
        self.shared += shared

    def note_sharing(self) -> int:
        """Look whether several requests use pages of it; 1 if that is so now, -1 if it is not any more, 0 as before."""
        before, self.is_shared = self.is_shared, self.page_refs > 1
        return self.is_shared - before

    def note(self, counted: "Counted") -> "Counted":
        """What of it is added up from now on; returns what was until now."""
        before, self.counted = self.counted, counted
        return before

    @property
    def held_by_chain(self) -> list[int]:
        """Pages of each rank that it and its parents hold."""
        return [sum(pages) for pages in zip(*(prefix.held for prefix in self.chain()), strict=True)]

    @property
    def borrowed(self) -> list[int]:
        """Pages of each rank that a request uses which begins with it, its parents' too."""
        return [sum(pages) for pages in zip(self.borrowed_before, self.full_pages, strict=True)]

    @property
    def borrowed_before(self) -> list[int]:
        """Those of them that are its parents'."""
        pages = list(self.fills)
        for prefix in self.chain():
            if prefix is not self:
                for rank, own in enumerate(prefix.full_pages):
                    pages[rank] += own + prefix.fills[rank]
        return pages

    @property
    def is_ready(self) -> bool:
        """Whether every rank has stored it."""
        return len(self.kept) == len(self.held)

    @property
    def page_refs(self) -> int:
        """How many requests use pages of it: none if they have copied all of them, since none is full."""
        return self.refs if any(self.lends()) else 0

    def lends(self, is_filled: bool = False) -> list[int]:
        """Pages of each rank that are its own and that its users use.

        Args:
            is_filled: whether a further one uses what is behind it in its last pages.
        """
        is_filled |= bool(self.filled_for) or any(prefix.refs for prefix in self.filled_by)
        if not is_filled:
            return list(self.full_pages)
        return [sum(pages) for pages in zip(self.full_pages, self.filled, strict=True)]

    def pages_of(self, rank: int, count: PageCount) -> int:
        """Pages of a rank that are its own, of a request that holds it."""
        return count.pages - self.borrowed_before[rank]

    def keep(self, rank: int, count: PageCount, filled: int) -> None:
        """A rank has stored it, and filled so many pages of its parent with that; see the attributes."""
        self.kept[rank] = count
        if filled:
            assert self.parent is not None
            self.fills[rank] = filled
            self.parent.be_filled(self.fills)
        self.full_pages = self.full_pages or [0] * len(self.held)
        self.full_pages[rank] = self.pages_of(rank, count) - count.partial

    def be_filled(self, pages: Sequence[int]) -> None:
        """So many of its own pages of each rank are full with what follows it."""
        self.filled = list(pages)

    def lose(self, name: str) -> None:
        """A request does not go on right behind it any more."""
        self.borrowers.discard(name)
        self.filled_for.discard(name)

    def adopt(self, child: "Prefix") -> None:
        """What used a prefix behind it, which is gone, goes on behind this one."""
        self.borrowers |= child.borrowers
        if any(child.fills):
            self.filled_for |= child.borrowers


@dataclass(eq=False)
class Tail(Entry):
    """What a request that has ended held behind a compressed prefix, uncompressed.

    Attributes:
        parent: that prefix, which stays as long as the tail does.
        keys: by which it is found, one for each unit of its tokens.
        end: tokens of the prompt and answer up to its last one.
        held: pages of each rank that it holds.
    """

    parent: Prefix
    keys: list[Hashable]
    end: int
    held: list[int]

    def pages_until(self, tokens: int) -> list[int]:
        """Pages of each rank behind the prefix's full ones, with so many tokens of prompt and answer."""
        kept = [self.parent.kept[rank].at(tokens) for rank in range(len(self.parent.held))]
        return [pages - shared for pages, shared in zip(kept, self.parent.borrowed, strict=True)]

    def cut(self, tokens: int, units: int) -> None:
        """It ends after so many tokens of prompt and answer, and has so many units."""
        self.end, self.keys = tokens, self.keys[:units]

    def hold(self, pages: Sequence[int]) -> list[int]:
        """It holds so many pages of each rank; returns what it did until now."""
        before, self.held = self.held, list(pages)
        return before
