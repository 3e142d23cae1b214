"""Sums over all compressed prefixes that admission asks for in every step, kept up to date.

Owns the sums, and what of each prefix is in them. Chains may be long and many: nothing here looks at all of them.
"""

from vllm_kvevict.engine.scheduler.nodes import Counted, Prefix


def pages_pinned(prefix: Prefix, is_shared: bool, is_filled: bool = False) -> list[int]:
    """Pages of each rank that are not counted as any borrower's and that no drop would free, of a prefix in use.

    Args:
        is_shared: whether several requests use pages of it, or of one that follows it.
        is_filled: as of :meth:`Prefix.lends`.
    """
    # What a single one uses becomes its own.
    return list(prefix.held) if is_shared else prefix.lends(is_filled)


def _pages_pinned(prefix: Prefix) -> list[int]:
    return pages_pinned(prefix, prefix.shared > 0) if prefix.refs else [0] * len(prefix.held)


def _pages_used(prefix: Prefix) -> list[int]:
    return list(prefix.held if prefix.refs or prefix.storing else [0] * len(prefix.held))


def freed(prefix: Prefix) -> list[int]:
    """Pages of each rank that are free once it is dropped; what a single borrower uses becomes that one's own."""
    if not prefix.refs:
        return list(prefix.held)
    return [held - used for held, used in zip(prefix.held, prefix.lends(), strict=True)]


def _pages_freed(prefix: Prefix) -> list[int]:
    if prefix.storing or prefix.shared or not prefix.is_ready:
        return [0] * len(prefix.held)
    return freed(prefix)


class Totals:
    """Sums over prefixes.

    Attributes:
        pinned, used, freed: as of :class:`Counted`.
    """

    def __init__(self, num_ranks: int):
        self.pinned, self.used, self.freed = ([0] * num_ranks for _ in range(3))

    def count(self, prefix: Prefix) -> None:
        """What a prefix holds, or who uses it, has changed."""
        self._replace(prefix, Counted(_pages_pinned(prefix), _pages_used(prefix), _pages_freed(prefix)))

    def remove(self, prefix: Prefix) -> None:
        """A prefix is gone."""
        nothing = [0] * len(prefix.held)
        self._replace(prefix, Counted(nothing, nothing, nothing))

    def _replace(self, prefix: Prefix, now: Counted) -> None:
        before = prefix.note(now)
        for total, added, removed in (
            (self.pinned, now.pinned, before.pinned),
            (self.used, now.used, before.used),
            (self.freed, now.freed, before.freed),
        ):
            for rank, pages in enumerate(added):
                total[rank] += pages - removed[rank]
