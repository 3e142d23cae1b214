"""Pages of each rank that requests hold and are promised, all together.

The books own these two sums. They are the sums over the accounts at any time, and together with what is cached and what
layers of other kinds hold never above the pools.
"""

from collections.abc import Sequence

from vllm_kvevict.engine.scheduler.account import Account, Need
from vllm_kvevict.schedules.base import RankCapacity


class Books:
    """Of all ranks.

    Args:
        ranks: what each can hold.

    Attributes:
        used, promised: pages of each rank that requests hold, and that are kept free for their prefills.
    """

    def __init__(self, ranks: Sequence[RankCapacity]):
        self.ranks = ranks
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

    def free(self, elsewhere: Sequence[int]) -> list[int]:
        """Pages of each rank that nobody holds or is promised.

        Args:
            elsewhere: pages of each rank that are not requests'.
        """
        pages = zip(self.ranks, self.used, self.promised, elsewhere, strict=True)
        return [rank.pages - used - promised - more for rank, used, promised, more in pages]

    def lacking(self, account: Account, need: Need, elsewhere: Sequence[int]) -> list[int]:
        """How many pages of each rank would have to be free besides, for what an account needs; 0 or less for none.

        A prefill grows into what it was promised, a decode into what nobody was.
        """
        held, promises = need
        lacking = []
        for rank, capacity in enumerate(self.ranks):
            grows = held[rank] - account.held[rank]
            promise = promises[rank] - account.promise[rank]
            # A rank that kept more than its share of a replay is promised more than there was room for.
            promised = self.promised[rank] + promise if grows + promise > 0 else 0
            lacking.append(self.used[rank] + elsewhere[rank] + grows + promised - capacity.pages)
        return lacking
