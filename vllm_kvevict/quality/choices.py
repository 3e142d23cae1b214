"""What policies kept in each layer and head, from the server's eviction log."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from vllm_kvevict.quality.results import Column, Result
from vllm_kvevict.schedules.reports import EvictionRecord, read_evictions


def evictions_by_request(path: Path) -> dict[str, EvictionRecord]:
    """An eviction log's evictions by request; of a request that was evicted twice, the last one."""
    return {eviction.request: eviction for eviction in read_evictions(path)}


def kept_shares(
    results: Iterable[Result], evictions: Mapping[str, EvictionRecord], budget: float
) -> dict[Column, np.ndarray]:
    """Share of the tokens kept, [layers, KV heads], on average over the requests of each column with this budget."""
    # vLLM appends a random part to the name that it tells the client.
    by_name = {name.rsplit("-", 1)[0]: eviction for name, eviction in evictions.items()} | dict(evictions)
    shares: dict[Column, list[np.ndarray]] = {}
    for result in results:
        eviction = by_name.get(result.request or "")
        if eviction is not None and result.budget == budget and eviction.heads:
            shares.setdefault(result.column, []).append(np.asarray(eviction.heads) / eviction.tokens)
    return {column: np.mean(found, axis=0) for column, found in shares.items()}
