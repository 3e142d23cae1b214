"""What operators see: Prometheus metrics, and one summary in the periodic log line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_kvevict.policies import available

if TYPE_CHECKING:
    from vllm_kvevict.schedules.reports import EvictionRecord

PREFIX = "vllm:kv_eviction_"
PHASES = ("prefill", "lookahead", "decode")
"""What was evicted: a prompt once it was read, or once its answer had begun, or an answer while it was written. Labels
of all that is told of it."""
COUNTERS = {
    "evicted_tokens": "Evicted KV entries; a token counts once per layer and KV head that dropped it.",
    "freed_pages": "Pages that evictions freed, over all ranks; the prefix cache may keep them.",
}
HISTOGRAMS = {
    "kept_ratio": (
        "Share of the KV entries that one eviction could drop and kept.",
        [i / 20 for i in range(1, 21)],
    ),
    "decision_seconds": (
        "Seconds spent choosing what one request keeps, on its slowest rank.",
        [1e-4 * 2**i for i in range(18)],
    ),
    "compaction_seconds": (
        "Seconds spent moving what one request keeps, on its slowest rank.",
        [1e-4 * 2**i for i in range(18)],
    ),
}
GAUGES = {
    "physical_pages": "Pages in use on a rank, including those of compressed and uncompressed prefixes.",
    "cached_pages": "Pages of a rank that hold compressed prefixes; requests that use one share most of its pages.",
    "cached_uncompressed_pages": "Pages of a rank that hold uncompressed prefixes, which requests share until they are "
    "evicted, and the last questions and answers of conversations.",
    "logical_kv_tokens": "KV entries that requests use on a rank, including those of prefixes that they share; a token "
    "counts once per layer and KV head.",
}
CACHE_GAUGES = {
    "cached_entries": "Compressed prefixes that are cached; after a reset, those that several requests still use.",
    "cached_conversations": "Conversations that are cached compressed, turn by turn; branches of one count each.",
}
FOUND = ("prefix", "turns", "tail", "uncompressed")
"""What of a prompt was found in the cache: compressed as a whole, or turn by turn; a conversation's last question and
answer; or anything else uncompressed."""
KEPT_WHOLE = ("changes", "short")
"""Why scopes ``prefix`` and ``turns`` keep chats whole: their template writes something else each time, or what comes
before the question, or each turn, is short."""


@dataclass
class EvictionStats(KVConnectorStats):
    """Numbers of one or more steps; ``data`` is plain so that it crosses processes."""

    data: dict[str, Any] = field(default_factory=dict)

    def on_eviction(self, eviction: "EvictionRecord") -> None:
        """Record a request that every rank has evicted."""
        told = {
            "evicted_tokens": eviction.stored - eviction.kept,
            "freed_pages": eviction.freed_pages,
            "evictions": {eviction.policy: 1},
            "kept_ratio": [eviction.kept_ratio],
            "decision_seconds": [eviction.decision_seconds],
            "compaction_seconds": [eviction.compaction_seconds],
        }
        self.data = _joined(self.data, {"phases": {eviction.phase: told}})

    def on_gauges(
        self,
        rank: int,
        physical_pages: int,
        cached_pages: int,
        cached_uncompressed_pages: int,
        logical_kv_tokens: int,
    ) -> None:
        """Record what a rank holds at the end of a step."""
        self.data.setdefault("ranks", {})[str(rank)] = {
            "physical_pages": physical_pages,
            "cached_pages": cached_pages,
            "cached_uncompressed_pages": cached_uncompressed_pages,
            "logical_kv_tokens": logical_kv_tokens,
        }

    def on_cache(self, cached: int, conversations: int, dropped: int, found: Mapping[str, int]) -> None:
        """Record how many compressed prefixes and conversations are cached; and since the last call, how many prefixes
        were dropped, and how many tokens of prompts were found, by :data:`FOUND`."""
        more = {"cache_drops": dropped, **({"found": found} if found else {})}
        self.data = _joined(self.data, more) | {
            "cached_entries": cached,
            "cached_conversations": conversations,
        }

    def on_lookahead(self, ended: int, step_seconds: Sequence[float]) -> None:
        """Record what became of prompts that are evicted once their answers have begun.

        Args:
            ended: answers that ended before.
            step_seconds: of each step with such an eviction.
        """
        if ended or step_seconds:
            told = {"ended": ended, "step_seconds": list(step_seconds)}
            self.data = _joined(self.data, {"lookahead": told})

    def aggregate(self, other: KVConnectorStats) -> "EvictionStats":
        latest = {name: value for name, value in other.data.items() if name in CACHE_GAUGES}
        if "ranks" in other.data:
            latest["ranks"] = {**self.data.get("ranks", {}), **other.data["ranks"]}
        more = {name: value for name, value in other.data.items() if name not in latest}
        return EvictionStats(_joined(self.data, more) | latest)

    def reduce(self) -> dict[str, int | float]:
        phases = self.data.get("phases", {}).values()
        ratios = [ratio for told in phases for ratio in told["kept_ratio"]]
        ranks = self.data.get("ranks", {}).values()
        summary: dict[str, int | float] = {"evictions": len(ratios)}
        if ratios:
            summary["mean kept ratio"] = round(sum(ratios) / len(ratios), 3)
            summary["freed pages"] = sum(told["freed_pages"] for told in phases)
        if lookahead := self.data.get("lookahead"):
            summary["ended in lookahead"] = lookahead["ended"]
            summary["slowest lookahead step"] = round(max(lookahead["step_seconds"], default=0), 3)
        summary["pages held"] = max((rank["physical_pages"] for rank in ranks), default=0)
        return summary

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


def _joined(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What was told, with more of it: counts add up, lists of observations join."""
    joined = dict(before)
    for name, value in more.items():
        if isinstance(value, Mapping):
            joined[name] = _joined(before.get(name, {}), value)
        else:
            joined[name] = before[name] + value if name in before else value
    return joined


class EvictionPromMetrics(KVConnectorPromMetrics):
    """The metrics at ``/metrics``.

    Attributes:
        of_process: the latest of this process; vLLM removes those before it.
    """

    of_process: ClassVar["EvictionPromMetrics | None"] = None

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list]
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        by_phase = [*labelnames, "phase"]
        self.counters = {name: self._counter(name, text, by_phase) for name, text in COUNTERS.items()}
        about = "Evictions, by policy; a request's answer may be evicted more than once."
        self.evictions = self._counter("evictions", about, [*by_phase, "policy"])
        about = "Compressed prefixes that were dropped to make room."
        self.cache_drops = self._counter("cache_drops", about, labelnames)
        about = "Tokens of prompts that requests began with from the cache, by kind."
        self.found = self._counter("found_tokens", about, [*labelnames, "kind"])
        # The front-end counts them before it is known which engine a request goes to.
        about = "Chats that scope prefix or turns keeps whole, by reason."
        self.kept_whole = self._counter("chats_kept_whole", about, [labelnames[0], "reason"])
        about = "Chats in scope turns of which some turns change with the next question, and are compressed again then."
        self.changing = self._counter("chats_that_change", about, [labelnames[0]])
        about = "Answers that ended within their lookahead, before their prompt was evicted."
        self.ended = self._counter("ended_in_lookahead", about, labelnames)
        about = "Seconds of steps that evict prompts after their lookahead."
        self.step_seconds = self._histogram_cls(
            name=PREFIX + "lookahead_step_seconds",
            documentation=about,
            buckets=[1e-3 * 2**i for i in range(16)],
            labelnames=labelnames,
        )
        self.model_name = next(iter(per_engine.values()))[0]
        self.histograms = {
            name: self._histogram_cls(
                name=PREFIX + name, documentation=text, buckets=buckets, labelnames=by_phase
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.cache_gauges = {name: self._gauge(name, text, labelnames) for name, text in CACHE_GAUGES.items()}
        self.gauges = {name: self._gauge(name, text, [*labelnames, "rank"]) for name, text in GAUGES.items()}
        # Series of the default labels exist from the start, so that a dashboard shows zeros and not gaps.
        for labels in per_engine.values():
            for metric in (self.cache_drops, self.ended, self.step_seconds, *self.cache_gauges.values()):
                metric.labels(*labels)
            for kind in FOUND:
                self.found.labels(*labels, kind)
            for phase in PHASES:
                for metric in (*self.counters.values(), *self.histograms.values()):
                    metric.labels(*labels, phase)
            for policy in available():
                if policy != "full":
                    self.evictions.labels(*labels, "prefill", policy)
        for reason in KEPT_WHOLE:
            self.kept_whole.labels(self.model_name, reason)
        self.changing.labels(self.model_name)
        EvictionPromMetrics.of_process = self

    def _counter(self, name: str, text: str, labelnames: list[str]) -> Any:
        return self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)

    def _gauge(self, name: str, text: str, labelnames: list[str]) -> Any:
        mode = "mostrecent"
        return self._gauge_cls(
            name=PREFIX + name, documentation=text, multiprocess_mode=mode, labelnames=labelnames
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for phase, told in transfer_stats_data.get("phases", {}).items():
            self._observe_phase(told, [*labels, phase])
        self.cache_drops.labels(*labels).inc(transfer_stats_data.get("cache_drops", 0))
        lookahead = transfer_stats_data.get("lookahead", {})
        self.ended.labels(*labels).inc(lookahead.get("ended", 0))
        for seconds in lookahead.get("step_seconds", ()):
            self.step_seconds.labels(*labels).observe(seconds)
        for kind, tokens in transfer_stats_data.get("found", {}).items():
            self.found.labels(*labels, kind).inc(tokens)
        for name in CACHE_GAUGES.keys() & transfer_stats_data.keys():
            self.cache_gauges[name].labels(*labels).set(transfer_stats_data[name])
        for rank, values in transfer_stats_data.get("ranks", {}).items():
            for name, gauge in self.gauges.items():
                gauge.labels(*labels, rank).set(values[name])

    def _observe_phase(self, told: Mapping[str, Any], labels: list) -> None:
        """Take over what was told of the evictions of one phase.

        Args:
            labels: with the phase.
        """
        for name, counter in self.counters.items():
            counter.labels(*labels).inc(told[name])
        for policy, count in told["evictions"].items():
            self.evictions.labels(*labels, policy).inc(count)
        for name, histogram in self.histograms.items():
            for value in told[name]:
                histogram.labels(*labels).observe(value)


def count_kept_whole(reason: str) -> None:
    """Count a chat that its server's scope keeps whole, if this process has metrics.

    Args:
        reason: one of :data:`KEPT_WHOLE`.
    """
    metrics = EvictionPromMetrics.of_process
    if metrics is not None:
        metrics.kept_whole.labels(metrics.model_name, reason).inc()


def count_changing() -> None:
    """Count a chat some of whose turns change with the next question, if this process has metrics."""
    metrics = EvictionPromMetrics.of_process
    if metrics is not None:
        metrics.changing.labels(metrics.model_name).inc()
