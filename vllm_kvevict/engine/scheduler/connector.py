"""The scheduler's end of the transport: admissions and answers go down, reports and claims come up from all ranks.

Owns what some ranks have said of an eviction; it is told to the log and to metrics once all have.
"""

import itertools
import time
from collections.abc import Mapping, Sequence

from vllm.logger import init_logger

from vllm_kvevict import __version__
from vllm_kvevict.engine import metrics
from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.messages import Claim, Handshake, Report, StepMessage, WorkerMessages
from vllm_kvevict.engine.process import mark_started
from vllm_kvevict.engine.scheduler.evictions import EvictionLog
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.schedules.reports import PartOfEviction, join

logger = init_logger("vllm.kv_eviction")


class SchedulerEnd:
    """Passes what the workers say on to the ledger, and counts it."""

    ledger: PageLedger

    def __init__(self, options: Options):
        self.options = options
        self.statistics = metrics.EvictionStats()
        self.log = EvictionLog(options.eviction_log)
        self.incomplete: dict[tuple[str, int, int], list[PartOfEviction]] = {}
        self._scheduled: float | None = None
        """When the first step since the last news was; a step may be before the news of the one that it follows."""
        self._heard = 0.0

    @property
    def is_bound(self) -> bool:
        """Whether our scheduler has handed over its ledger, which it does when it is made."""
        return hasattr(self, "ledger")

    def on_handshakes(self, handshakes: Sequence[Handshake]) -> None:
        """Learn what the ranks can hold.

        Raises:
            KVEvictionError: a rank runs another version of this package.
        """
        for handshake in handshakes:
            if handshake.version != __version__:
                raise KVEvictionError(
                    f"rank {handshake.rank} has vllm-kvevict {handshake.version}, the scheduler {__version__}: "
                    "--kv-eviction needs the same version everywhere, so install one version on every machine"
                )
        self.ledger.set_capacity({handshake.rank: handshake.capacity for handshake in handshakes})
        self.ledger.requests.learn(
            has_w_o=all(handshake.has_w_o for handshake in handshakes),
            has_rotary=all(handshake.has_rotary for handshake in handshakes),
            ring_parts=min(handshake.ring_parts for handshake in handshakes),
        )
        logger.info(self._start_up_line())
        mark_started()

    def _start_up_line(self) -> str:
        options, ledger = self.options, self.ledger
        length = ledger.max_model_len
        kept = options.config.budget_for(length) if options.evicts(options.config, length) else length
        at_once = self._at_once(kept)
        pages = ", ".join(
            f"rank {r}: {capacity.pages}"
            for r, capacity in zip(ledger.ranks, ledger.books.ranks, strict=True)
        )
        budget = "" if options.policy == "full" else f", budget {options.budget:g}"
        budget += " of the tokens before the question" if options.scope == "prefix" else ""
        if options.lookahead:
            budget += f", after {options.lookahead} tokens of the answer"
            beside = f", and {self._at_once(length)} before"
        else:
            beside = ""
        return (
            f"KV eviction: policy {options.policy}{budget}, page size {options.page_size} tokens, pages per rank "
            f"({pages}), about {at_once} requests of {length:,} tokens at once after eviction{beside}"
        )

    def _at_once(self, entries: int) -> int:
        """Requests of the longest length that fit, with so many entries in each row."""
        ledger = self.ledger
        beside = ledger.others.pages_beside(ledger.max_model_len)
        return min(
            rank.pages // (rank.rows * -(-entries // self.options.page_size) + pages)
            for rank, pages in zip(ledger.books.ranks, beside, strict=True)
        )

    def next_message(self, scheduled: Mapping[str, int]) -> StepMessage:
        """As of :meth:`PageLedger.next_message`."""
        if scheduled and self._scheduled is None:
            self._scheduled = time.perf_counter()
        return self.ledger.next_message(scheduled)

    def on_messages(self, messages: WorkerMessages) -> None:
        """Take over the ranks' news of a step."""
        began = max(self._scheduled or 0.0, self._heard)
        self._scheduled, self._heard = None, time.perf_counter()
        seconds = [self._heard - began] if _evicts_after_lookahead(messages) else []
        self.statistics.on_lookahead(self.ledger.requests.take_ended_in_lookahead(), seconds)
        self._pass_on_claims(messages)
        for rank, message in messages.by_rank.items():
            for request_id, reports in message.reports.items():
                for report in reports:
                    self._on_report(rank, request_id, report)
            if message.holdings is not None:
                self.ledger.verify(rank, message.holdings)
            self.statistics.on_gauges(
                rank,
                message.physical_pages,
                message.cached_pages,
                message.uncompressed_pages,
                message.logical_tokens,
            )
        self.statistics.on_cache(*self.ledger.shared.take_statistics())

    def _pass_on_claims(self, messages: WorkerMessages) -> None:
        """Join what all ranks say of an eviction, which they do in the same step."""
        claims: dict[str, list[Claim]] = {}
        for message in messages.by_rank.values():
            for request_id, claim in message.claims.items():
                claims.setdefault(request_id, []).append(claim)
        for request_id, of_ranks in claims.items():
            self.ledger.on_claims(request_id, of_ranks)

    def _on_report(self, rank: int, request_id: str, report: Report) -> None:
        self.ledger.on_report(rank, request_id, report)
        if report.part is not None:
            self._count(request_id, report, report.part)

    def _count(self, request_id: str, report: Report, part: PartOfEviction) -> None:
        # Not the ledger's business: a request may have finished with the very step that evicted it.
        key = request_id, report.epoch, report.tokens
        parts = self.incomplete.setdefault(key, [])
        parts.append(part)
        if len(parts) == len(self.ledger.ranks):
            del self.incomplete[key]
            eviction = join(request_id, report.tokens, parts)
            self.statistics.on_eviction(eviction)
            self.log.write(eviction)

    def take_statistics(self) -> metrics.EvictionStats | None:
        """What was counted since the last call; None if nothing was."""
        if self.statistics.is_empty():
            return None
        statistics, self.statistics = self.statistics, metrics.EvictionStats()
        return statistics


def _evicts_after_lookahead(messages: WorkerMessages) -> bool:
    """Whether a prompt was evicted in the step whose answer had begun."""
    reports = (reports for message in messages.by_rank.values() for reports in message.reports.values())
    parts = (report.part for report in itertools.chain.from_iterable(reports))
    return any(part is not None and part.phase == "lookahead" for part in parts)
