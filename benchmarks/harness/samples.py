"""What a soak sees of a server moment by moment, and how its memory grows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Sample:
    """What was seen at one moment.

    Attributes:
        seconds: since the load began.
        answered: requests that are over.
        rss_mib: resident memory by process; what processes share counts in each.
        pages, entries: held over all ranks by requests.
        cached: pages held by cached prefixes.
        running, waiting: requests.
        preemptions: since the server started.
        prefix_hits: prompt tokens that were found in the prefix cache since then.
    """

    seconds: float
    answered: int
    rss_mib: dict[str, float]
    pages: int
    entries: int
    running: int
    waiting: int
    preemptions: int
    cached: int = 0
    prefix_hits: int = 0

    @property
    def rss(self) -> float:
        """MiB over all processes."""
        return sum(self.rss_mib.values())


def resident_memory() -> dict[str, float]:
    """MiB of each kind of process that this one has started."""
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.name()] += process.memory_info().rss / 2**20
        except psutil.Error:  # it has ended
            continue
    return dict(found)


def baseline(samples: Sequence[Sample]) -> float:
    """MiB resident after the warm-up, the first third of the load: the median of the sixth that follows."""
    return median(sample.rss for sample in _part(samples, 2, 3))


def growth(samples: Sequence[Sample]) -> float:
    """Growth of the resident memory from the sixth after the warm-up to the last sixth, as a share."""
    return median(sample.rss for sample in _part(samples, 5, 6)) / baseline(samples) - 1


def _part(samples: Sequence[Sample], first: int, end: int) -> Sequence[Sample]:
    """The samples between two sixths of the time, or the one next to them."""
    last = samples[-1].seconds
    found = [sample for sample in samples if first * last <= 6 * sample.seconds <= end * last]
    return found or [min(samples, key=lambda sample: abs(6 * sample.seconds - end * last))]
