"""What the rows of a request in a step mean for its eviction. Owns nothing."""

from dataclasses import dataclass

from vllm_kvevict.schedules.reports import ExtraTokens


@dataclass(frozen=True)
class ExtraRows:
    """Extra tokens of a request, and their rows in the batch."""

    tokens: ExtraTokens
    rows: slice

    @property
    def count(self) -> int:
        """How many there are."""
        return self.rows.stop - self.rows.start


@dataclass(frozen=True)
class QueryRows:
    """A request's rows in a step that its eviction has to see.

    Attributes:
        rows: its rows in the batch, none while its prompt is repeated.
        target: where the last of them, which belong to the window, go in :attr:`Collected.window`.
        window: how many rows the window has.
        evicts: whether the step ends at an eviction position, or with the last repeat.
        extra: what the step computes besides: a probe with the end of a chunk that is not the last, or a repeat.
    """

    rows: slice
    target: slice
    window: int
    evicts: bool
    extra: ExtraRows | None

    @property
    def count(self) -> int:
        """How many there are, without the extra ones."""
        return self.rows.stop - self.rows.start
