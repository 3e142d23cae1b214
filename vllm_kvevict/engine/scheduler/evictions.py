"""What each eviction kept, joined from all ranks; a debug line for people, a line of JSON for programs."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vllm.logger import init_logger

from vllm_kvevict.schedules.reports import Report

logger = init_logger("vllm.kv_eviction")


@dataclass(frozen=True)
class Eviction:
    """One request's eviction, over all ranks; its fields are those of a line of ``eviction_log``.

    Attributes:
        request: id of the request in the engine, which begins with the one that the client was told.
        tokens: the request's token count when it was evicted.
        policy: label of the policy that chose.
        kept, stored: KV entries after and before, over all layers and KV heads.
        freed_pages: pages returned to the pools.
        held_pages: the most pages that the request held until then.
        heads: [layers][KV heads] of the model, entries kept.
        decision_seconds, compaction_seconds: spent on choosing and on moving, on the slowest rank.
    """

    request: str
    tokens: int
    policy: str
    kept: int
    stored: int
    freed_pages: int
    held_pages: int
    heads: list[list[int]]
    decision_seconds: float
    compaction_seconds: float


def join(request_id: str, reports: Sequence[Report]) -> Eviction:
    """Make one eviction of the reports of all ranks, one of each."""
    first, heads = reports[0], kept_by_head(reports)
    return Eviction(
        request=request_id,
        tokens=first.tokens,
        policy=first.policy,
        kept=sum(map(sum, heads)),
        stored=sum(map(len, heads)) * first.tokens,
        freed_pages=sum(report.freed_pages for report in reports),
        held_pages=sum(report.peak_pages for report in reports),
        heads=heads,
        decision_seconds=max(report.decision_seconds for report in reports),
        compaction_seconds=max(report.compaction_seconds for report in reports),
    )


def kept_by_head(reports: Sequence[Report]) -> list[list[int]]:
    """[layers][KV heads] of the model, entries kept.

    Stages report layers of their own. Ranks of a stage report heads of the same layers; where they replicate a KV head
    they report the same of it, and it counts once.
    """
    layers: dict[int, dict[int, int]] = {}
    for report in reports:
        for layer, heads in enumerate(report.kept, report.first_layer):
            layers.setdefault(layer, {}).update(enumerate(heads, report.first_head))
    return [[heads[head] for head in sorted(heads)] for _, heads in sorted(layers.items())]


class EvictionLog:
    """Tells of each eviction.

    Args:
        path: file that gets a line of JSON for each eviction; None for no file.
    """

    def __init__(self, path: str | None):
        self.path = path
        self._has_failed = False

    def write(self, eviction: Eviction) -> None:
        """Tell of an eviction; a file that cannot be written is warned of once, and tried again with the next."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", _for_people(eviction))
        if self.path is None:
            return
        try:
            # Opened for each line, so that the file may be moved away while the server runs.
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(eviction)) + "\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "KV eviction: the eviction log misses lines, --kv-eviction-config.eviction_log %r cannot be "
                    "written (%s)",
                    self.path,
                    error.strerror,
                )
            self._has_failed = True


def _for_people(eviction: Eviction) -> str:
    layers = "; ".join(
        f"layer {layer}: {sum(heads)}/{len(heads) * eviction.tokens} ({' '.join(map(str, heads))})"
        for layer, heads in enumerate(eviction.heads)
    )
    return (
        f"KV eviction: request {eviction.request} at {eviction.tokens} tokens by {eviction.policy}: "
        f"kept {eviction.kept}/{eviction.stored} entries, freed {eviction.freed_pages} pages, "
        f"held at most {eviction.held_pages}; kept per layer (per KV head): {layers}"
    )
