"""What operators see: Prometheus metrics, and one summary in the periodic log line."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_kvevict.policies import available

if TYPE_CHECKING:
    from vllm_kvevict.schedules.reports import EvictionRecord

PREFIX = "vllm:kv_eviction_"
COUNTERS = {
    "evicted_tokens": "Evicted KV entries; a token counts once per layer and KV head that dropped it.",
    "freed_pages": "Pages that evictions freed, over all ranks; the prefix cache may keep them.",
    "cache_drops": "Compressed prefixes that were dropped to make room.",
}
HISTOGRAMS = {
    "kept_ratio": ("Share of a request's KV entries kept by its eviction.", [i / 20 for i in range(1, 21)]),
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
    "cached_uncompressed_pages": "Pages of a rank that hold uncompressed prefixes; requests share them until they are "
    "evicted.",
    "logical_kv_tokens": "KV entries that requests use on a rank, including those of prefixes that they share; a token "
    "counts once per layer and KV head.",
}
KEPT_WHOLE = ("changes", "short")
"""Why scope ``prefix`` keeps chats whole: their template writes something else each time, or little comes before."""


@dataclass
class EvictionStats(KVConnectorStats):
    """Numbers of one or more steps; ``data`` is plain so that it crosses processes."""

    data: dict[str, Any] = field(default_factory=dict)

    def on_eviction(self, eviction: "EvictionRecord") -> None:
        """Record a request that every rank has evicted."""
        self._add("evicted_tokens", eviction.stored - eviction.kept)
        self._add("freed_pages", eviction.freed_pages)
        policies = self.data.setdefault("evictions", {})
        policies[eviction.policy] = policies.get(eviction.policy, 0) + 1
        self.data.setdefault("kept_ratio", []).append(eviction.kept / eviction.stored)
        for name in ("decision_seconds", "compaction_seconds"):
            self.data.setdefault(name, []).append(getattr(eviction, name))

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

    def on_prefixes(self, cached: int, dropped: int) -> None:
        """Record how many prefixes are cached, and how many were dropped since the last call."""
        self.data["cached_entries"] = cached
        self._add("cache_drops", dropped)

    def _add(self, name: str, amount: int) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> "EvictionStats":
        merged = EvictionStats(dict(self.data))
        for name, value in other.data.items():
            if name == "ranks":
                merged.data[name] = {**merged.data.get(name, {}), **value}
            elif name == "cached_entries":
                merged.data[name] = value
            elif name == "evictions":
                known = merged.data.get(name, {})
                merged.data[name] = {p: known.get(p, 0) + value.get(p, 0) for p in {**known, **value}}
            else:  # counters add up, lists of observations join
                merged.data[name] = merged.data[name] + value if name in merged.data else value
        return merged

    def reduce(self) -> dict[str, int | float]:
        ratios = self.data.get("kept_ratio", [])
        ranks = self.data.get("ranks", {}).values()
        summary: dict[str, int | float] = {"evictions": len(ratios)}
        if ratios:
            summary["mean kept ratio"] = round(sum(ratios) / len(ratios), 3)
            summary["freed pages"] = self.data["freed_pages"]
        summary["pages held"] = max((rank["physical_pages"] for rank in ranks), default=0)
        return summary

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data = {}


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
        self.counters = {name: self._counter(name, text, labelnames) for name, text in COUNTERS.items()}
        self.evictions = self._counter("evictions", "Requests evicted, by policy.", [*labelnames, "policy"])
        # The front-end counts them before it is known which engine a request goes to.
        about = "Chats that scope prefix keeps whole, by reason."
        self.kept_whole = self._counter("chats_kept_whole", about, [labelnames[0], "reason"])
        self.model_name = next(iter(per_engine.values()))[0]
        self.histograms = {
            name: self._histogram_cls(
                name=PREFIX + name, documentation=text, buckets=buckets, labelnames=labelnames
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        about = "Compressed prefixes that are cached; after a reset, those that several requests still use."
        self.cached_entries = self._gauge("cached_entries", about, labelnames)
        self.gauges = {name: self._gauge(name, text, [*labelnames, "rank"]) for name, text in GAUGES.items()}
        # Series of the default labels exist from the start, so that a dashboard shows zeros and not gaps.
        for labels in per_engine.values():
            for metric in (*self.counters.values(), *self.histograms.values(), self.cached_entries):
                metric.labels(*labels)
            for policy in available():
                if policy != "full":
                    self.evictions.labels(*labels, policy)
        for reason in KEPT_WHOLE:
            self.kept_whole.labels(self.model_name, reason)
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
        for name, counter in self.counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name, 0))
        if "cached_entries" in transfer_stats_data:
            self.cached_entries.labels(*labels).set(transfer_stats_data["cached_entries"])
        for policy, count in transfer_stats_data.get("evictions", {}).items():
            self.evictions.labels(*labels, policy).inc(count)
        for name, histogram in self.histograms.items():
            for value in transfer_stats_data.get(name, ()):
                histogram.labels(*labels).observe(value)
        for rank, values in transfer_stats_data.get("ranks", {}).items():
            for name, gauge in self.gauges.items():
                gauge.labels(*labels, rank).set(values[name])


def count_kept_whole(reason: str) -> None:
    """Count a chat that scope ``prefix`` keeps whole, if this process has metrics.

    Args:
        reason: one of :data:`KEPT_WHOLE`.
    """
    metrics = EvictionPromMetrics.of_process
    if metrics is not None:
        metrics.kept_whole.labels(metrics.model_name, reason).inc()
