"""What the host asks of every way of evicting: when, how much is held until then and afterwards, and who waits.

Owns nothing: a schedule has no state, and its answers follow from the arguments alone, in every process. What is done
on a rank is its other half (``schedules/eviction.py``).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.policies import EvictionConfig, most_candidates
from vllm_kvevict.policies.sinks import num_sinks
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import sums_up
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.reports import Answered, Claimed

MOST_PREFIXES = 4096
"""Compressed prefixes that a rank caches at most; each turn of a conversation is one."""

MOST_SEGMENTS = 4096
"""Segments of uncompressed prefixes that a server keeps at most."""

PARTS = 256
"""Of a pool: no segment takes more than one, so that who uses little of one holds little of the pool."""


def most_prefixes(pages: int, rows: int) -> int:
    """Compressed prefixes that a pool has room for; each has a page of nearly every row."""
    return min(pages // rows, MOST_PREFIXES)


@dataclass(frozen=True)
class RankCapacity:
    """What one rank can hold, and its share of the model.

    Attributes:
        pages: of its pool.
        first_layer, num_layers: its layers; of the model's num_model_layers.
        num_kv_heads: its KV heads; of the model's num_model_kv_heads.
    """

    pages: int
    first_layer: int
    num_layers: int
    num_kv_heads: int
    num_model_layers: int
    num_model_kv_heads: int

    @property
    def rows(self) -> int:
        """Rows (layers x KV heads) that each request has there."""
        return self.num_layers * self.num_kv_heads

    @property
    def has_some_heads(self) -> bool:
        """Whether it has some of the KV heads of its layers, and other ranks the rest."""
        return self.num_kv_heads < self.num_model_kv_heads

    @property
    def columns(self) -> int:
        """Pages for each row."""
        return self.pages // self.rows

    @property
    def most_prefixes(self) -> int:
        """Compressed prefixes that it has room for."""
        return most_prefixes(self.pages, self.rows)


class Arbiter(ABC):
    """What the scheduler decides one eviction by, where no rank can decide alone.

    Attributes:
        is_done: whether the last answer was the decision.
    """

    is_done = False

    @abstractmethod
    def on_claims(self, claims: Sequence[Claimed]) -> Answered:
        """Answer what all ranks said in one step.

        Raises:
            ValueError: the claims do not go together.
        """


class Schedule(ABC):
    """One way of evicting, as the host sees it: when, how much is held, and who waits; it has no state.

        tokens read   0 ------ position ------ position ------ n ------------> decoding
        in a layer      store    |               |             |  the last position
        and attend               +---------------+-------------+--> Eviction.after_layer: record, score, choose, compact
        after the step                                              report, or wait for other ranks

    Where nothing else is said, a prompt is evicted once, at n, and is held whole until then. Most questions are about a
    phase; its ``end`` is the papers' n.
    """

    eviction: type[Eviction]
    """What is done on each rank, of which every request has one object in each phase."""
    after_lookahead: type[Eviction] | None = None
    """The same for prompts whose answers have begun; None if they are not evicted then."""
    holds_whole_prompt = True
    """Whether all that was read is held until the last position, unless layers recycle pages."""
    reads_token_ids = False
    """Whether the prompt's token ids are needed again after they were read."""
    repeats_prompt = False
    """Whether the prompt is repeated before it is evicted, so that the step that ends at n does not evict it."""

    # When, known before the prompt is read.

    def phases(self, config: EvictionConfig, name: str, n: int) -> tuple[Phase, ...]:
        """The phases of a request whose prompt, or prefix, of n tokens is evicted.

        Args:
            name: of the schedule.
        """
        positions = self.positions(config, n)
        return (
            Phase(
                config,
                name,
                positions,
                probe=self.probe(config, n),
                most_cached=self.most_cached(config, n),
                leaves_at=positions[0] if self.holds_whole_prompt else 0,
            ),
        )

    def most_cached(self, config: EvictionConfig, n: int) -> int:
        """The most of n tokens which are evicted that a request may begin with uncompressed: those whose queries choose
        are read, since queries are not stored."""
        # Sums over the queries of all tokens need all queries.
        reads_all = not self.holds_whole_prompt or sums_up(config.inputs)
        return 0 if reads_all else n - max(1, config.window_for(n))

    def positions(self, config: EvictionConfig, n: int) -> tuple[int, ...]:
        """Numbers of tokens after which a prompt of n is evicted, ascending; the last is n."""
        return (n,)

    def probe(self, config: EvictionConfig, n: int) -> int:
        """Extra tokens of the step that reaches a position before the last one."""
        return 0

    def conflict_with_stages(self, config: EvictionConfig, stages: Sequence[int]) -> str | None:
        """Why pipeline stages of so many layers cannot serve it, None if they can; the end of a sentence.

        Raises:
            ValueError: no stages could, since the model has too few layers.
        """
        return None

    def most_extra_rows(self, params: Mapping[str, Any]) -> int:
        """The most extra tokens that a step computes for a prompt, beside those that it reads.

        Args:
            params: of the policy.
        """
        return 0

    def chunks(self, phase: Phase, longest: int) -> list[tuple[int, int]]:
        """What is repeated once the prompt is read, (start, stop) of each step.

        Args:
            longest: tokens that workers have room for in a request.
        """
        return []

    def conflict_with_length(self, phase: Phase, longest: int) -> str | None:
        """Why a prompt of that length cannot be evicted, None if it can; the end of a sentence.

        Args:
            longest: tokens that workers have room for in a request.
        """
        return None

    # How much is held.

    def extra_entries(self, phase: Phase, page_size: int) -> int:
        """Entries that each row may hold beside the prompt's n, once that is read and until it is evicted."""
        return 0

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        """Whether a prompt that one step reads can be evicted layer by layer, each into the pages of the one before.

        Then each layer is compacted once it has attended, which may be when it is stored at all.

        Args:
            is_asynchronous: whether the device runs behind the host, which then waits to learn what a layer keeps.
        """
        return False

    def layer_budgets(self, phase: Phase, num_layers: int) -> list[int]:
        """Tokens per KV head that each of the model's layers keeps, where no scores decide that."""
        return phase.config.layer_budgets(phase.n, num_layers)

    def is_ragged(self, config: EvictionConfig) -> bool:
        """Whether scores decide how much a row keeps."""
        return config.heads_compete

    def peak(self, phase: Phase, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        """The most pages that a rank holds until a prompt's first phase ends.

        Args:
            by_layer: whether one step evicts it layer by layer: one is whole while those below hold what they keep.
        """
        whole = pages_for(phase.end, page_size)
        if not by_layer:
            return rank.rows * whole
        below = self.kept_pages(phase, 0, rank, page_size, rank.num_layers - 1)
        return min(rank.rows * whole, rank.num_kv_heads * whole + below)

    def kept_pages(
        self, phase: Phase, more: int, rank: RankCapacity, page_size: int, num_layers: int, shared: int = 0
    ) -> int:
        """The most pages that a rank's lowest ``num_layers`` layers hold ``more`` tokens after an eviction.

        Whatever the scores: of rows that compete any may win.

        Args:
            shared: further entries of each layer that its rows share in any way.
        """
        config, n = phase.config, phase.n
        heads, always = rank.num_kv_heads, config.window_for(n) + num_sinks(config, n)
        every = self.layer_budgets(phase, rank.num_model_layers)
        pages = 0
        # Most layers have the same budget, and admission asks this of every request that waits, in every step.
        for budget, layers in Counter(every[rank.first_layer :][:num_layers]).items():
            if config.heads_compete:
                most = most_candidates(config, budget - always, n - always, heads, rank.num_model_kv_heads)
                longest = n + more + shared
                pages += layers * ragged_pages(most + shared, heads, always + more, longest, page_size)
            else:
                longest = budget + more + shared
                pages += layers * ragged_pages(shared, heads, budget + more, longest, page_size)
        return pages

    def kept_entries(self, phase: Phase, rank: RankCapacity) -> tuple[int, int]:
        """What a rank's rows hold at most of a phase that is done: entries of each, and what a layer's rows share.

        Whatever the scores: of rows that compete any may win. Where layers have budgets of their own, that of the
        largest.
        """
        config, n = phase.config, phase.n
        budget = max(self.layer_budgets(phase, rank.num_model_layers)[rank.first_layer :][: rank.num_layers])
        if not config.heads_compete:
            return budget, 0
        always = config.window_for(n) + num_sinks(config, n)
        heads = rank.num_kv_heads
        return always, most_candidates(config, budget - always, n - always, heads, rank.num_model_kv_heads)

    # Who waits.

    def decides_across_stages(self, num_stages: int) -> bool:
        """Whether stages have to hear of the others before they can choose."""
        return False

    def arbiter(self, phase: Phase, rank: RankCapacity) -> Arbiter:
        """What the scheduler decides by if stages have to hear of the others.

        Args:
            rank: any of them, for the size of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} decides on each stage alone")


def pages_for(entries: int, page_size: int) -> int:
    """Pages of a row with so many entries."""
    return -(-entries // page_size)


def ragged_pages(shared: int, rows: int, always: int, longest: int, page_size: int) -> int:
    """The most pages of rows that share entries and end anywhere in a page.

    Args:
        shared: entries that the rows share in any way.
        always: entries that each of them has besides.
        longest: the most entries of one row.
    """
    entries = shared + rows * always
    return min((entries + rows * (page_size - 1)) // page_size, rows * pages_for(longest, page_size))
