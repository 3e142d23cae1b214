"""Pages of each rank: those that requests hold and are promised, what is cached, what layers of other kinds hold.

The books own the first three sums: over the accounts, and over what is shared, at any time. All together they are never
above the pools: that is asked here before anything is taken.
"""

from collections.abc import Iterable, Sequence

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.other_layers import OtherLayers
from vllm_kvevict.engine.scheduler.terms import Need
from vllm_kvevict.schedules.base import RankCapacity


class Books:
    """Of all ranks.

    Attributes:
        ranks: what each can hold.
        used, promised: pages of each rank that requests hold, and that are kept free for their prefills.
        cached: those that shared entries hold, compressed and not.
    """

    def __init__(self, ranks: Sequence[RankCapacity], others: OtherLayers):
        self.ranks, self.others = ranks, others
        self.used, self.promised, self.cached = ([0] * len(ranks) for _ in range(3))

    def hold(self, account: Account, need: Need) -> None:
        """An account now needs so much."""
        held, promise = need
        for rank, pages in enumerate(held):
            self.used[rank] += pages - account.held[rank]
            self.promised[rank] += promise[rank] - account.promise[rank]
        account.hold(need)

    def take_over(self, account: Account) -> None:
        """An account begins with pages that were cached until now."""
        self.used = [sum(pair) for pair in zip(self.used, account.held, strict=True)]

    def close(self, account: Account) -> None:
        """A request is gone."""
        nothing = [0] * len(self.ranks)
        self.hold(account, (nothing, nothing))

    def cache(self, more: Sequence[int]) -> None:
        """Shared entries hold so many pages more of each rank."""
        self.cached = [sum(pair) for pair in zip(self.cached, more, strict=True)]

    @property
    def held(self) -> list[int]:
        """Pages of each rank that requests and shared entries hold, promises apart."""
        return [sum(pair) for pair in zip(self.used, self.cached, strict=True)]

    def usage(self, borrowed: Sequence[int]) -> float:
        """Share of the pool in use on the fullest rank, if so many pages of what is cached are in use."""
        beside = self.others.pages(-self.others.snapshots.blocks_without())
        pages = zip(self.ranks, self.used, borrowed, beside, strict=True)
        return max(((used + shared + more) / rank.pages for rank, used, shared, more in pages), default=0.0)

    @property
    def left(self) -> list[int]:
        """Pages of each rank that nobody holds or is promised, and that other layers may hold."""
        pages = zip(self.ranks, self.used, self.promised, self.cached, strict=True)
        return [rank.pages - used - promised - cached for rank, used, promised, cached in pages]

    @property
    def free(self) -> list[int]:
        """The same without what other layers hold."""
        return self.free_beside(0)

    def free_beside(self, blocks: int) -> list[int]:
        """The same if other layers hold so many blocks besides."""
        return [left - beside for left, beside in zip(self.left, self.others.pages(blocks), strict=True)]

    def room_for_drafts(self, accounts: Iterable[Account]) -> list[int]:
        """Pages of each rank that draft tokens may take in the next step: the free ones, less those that accounts
        which are promised none need for one token each."""
        room = self.free
        for account in accounts:
            if account.tokens >= account.promised_until:
                more = account.growth(account.tokens, account.tokens + 1)
                room = [free - pages for free, pages in zip(room, more, strict=True)]
        return room

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
        others = self.others.pages()
        lacking = []
        for index, rank in enumerate(self.ranks):
            grows = held[index] - account.held[index]
            promise = promises[index] - account.promise[index]
            # A rank that kept more than its share of a replay is promised more than there was room for.
            promised = self.promised[index] + promise if grows + promise > 0 else 0
            elsewhere = self.cached[index] + others[index]
            lacking.append(self.used[index] + elsewhere + grows + promised - rank.pages)
        return lacking
