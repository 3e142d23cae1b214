"""Pages of each rank: those that requests hold and are promised, what is cached, what layers of other kinds hold.

The books own the first two sums, which are the sums over the accounts at any time. All together they are never above
the pools: that is asked here before anything is taken.
"""

from collections.abc import Sequence

from vllm_kvevict.engine.scheduler.account import Account, Need
from vllm_kvevict.engine.scheduler.other_layers import OtherLayers
from vllm_kvevict.engine.scheduler.shared.prefixes import PrefixCache
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.schedules.base import RankCapacity


class Books:
    """Of all ranks.

    Args:
        ranks: what each can hold.
        prefixes, segments: what is cached, compressed and not.
        others: layers that are not evicted.

    Attributes:
        used, promised: pages of each rank that requests hold, and that are kept free for their prefills.
    """

    def __init__(
        self,
        ranks: Sequence[RankCapacity],
        prefixes: PrefixCache,
        segments: SegmentCache,
        others: OtherLayers,
    ):
        self.ranks, self.prefixes, self.segments, self.others = ranks, prefixes, segments, others
        self.used = [0] * len(ranks)
        self.promised = [0] * len(ranks)

    def hold(self, account: Account, need: Need) -> None:
        """An account now needs so much."""
        held, promise = need
        for rank, pages in enumerate(held):
            self.used[rank] += pages - account.held[rank]
            self.promised[rank] += promise[rank] - account.promise[rank]
        account.take(need)

    def close(self, account: Account) -> None:
        """A request is gone."""
        nothing = [0] * len(self.ranks)
        self.hold(account, (nothing, nothing))

    def with_columns(self, pages: Sequence[int], columns: int) -> list[int]:
        """Pages of each rank together with those of so many columns of segments."""
        return [more + rank.rows * columns for more, rank in zip(pages, self.ranks, strict=True)]

    def columns_for(self, pages: Sequence[int]) -> int:
        """Columns of segments that have so many pages of each rank."""
        return max((-(-more // rank.rows) for more, rank in zip(pages, self.ranks, strict=True)), default=0)

    @property
    def cached(self) -> list[int]:
        """Pages of each rank that cached prefixes and segments hold."""
        return self.with_columns(self.prefixes.held, self.segments.columns)

    @property
    def held(self) -> list[int]:
        """Pages of each rank that requests and cached prefixes hold, promises apart."""
        return [sum(pair) for pair in zip(self.used, self.cached, strict=True)]

    @property
    def usage(self) -> float:
        """Share of the pool in use on the fullest rank; cached prefixes that no request uses are not."""
        cached = self.others.together_with(self.with_columns(self.prefixes.in_use(), self.segments.pinned))
        pairs = zip(self.used, cached, self.ranks, strict=True)
        return max(((used + prefixes) / rank.pages for used, prefixes, rank in pairs), default=0.0)

    @property
    def free(self) -> list[int]:
        """Pages of each rank that nobody holds or is promised."""
        return self._beside(self.others.together_with(self.cached))

    @property
    def idle(self) -> list[int]:
        """The same, with the pages of segments that nobody uses."""
        return self._beside(self.with_columns(self.prefixes.held, self.segments.pinned))

    def _beside(self, elsewhere: Sequence[int]) -> list[int]:
        pages = zip(self.ranks, self.used, self.promised, elsewhere, strict=True)
        return [rank.pages - used - promised - more for rank, used, promised, more in pages]

    def fits(self, account: Account, need: Need, freed: Sequence[int] | None = None) -> bool:
        """Whether every rank has room for what an account needs, if ``freed`` pages of each rank are free besides."""
        lacking = self.lacking(account, need)
        if freed is None:
            return max(lacking, default=0) <= 0
        return all(lack <= more for lack, more in zip(lacking, freed, strict=True))

    def lacking(self, account: Account, need: Need) -> list[int]:
        """How many pages of each rank would have to be free besides, for what an account needs; 0 or less for none.

        A prefill grows into what it was promised, a decode into what nobody was.
        """
        # Asked of every request in every step.
        held, promises = need
        cached, columns, others = self.prefixes.held, self.segments.columns, self.others.pages()
        lacking = []
        for index, rank in enumerate(self.ranks):
            grows = held[index] - account.held[index]
            promise = promises[index] - account.promise[index]
            # A rank that kept more than its share of a replay is promised more than there was room for.
            promised = self.promised[index] + promise if grows + promise > 0 else 0
            elsewhere = cached[index] + rank.rows * columns + others[index]
            lacking.append(self.used[index] + elsewhere + grows + promised - rank.pages)
        return lacking
