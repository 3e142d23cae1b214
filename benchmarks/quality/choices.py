"""What policies kept in each layer and head, from the server's log."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness.kept import Eviction, parse_evictions
from benchmarks.quality.results import Column, Result


def read_log(path: Path) -> dict[str, Eviction]:
    """A log's evictions by request; of a request that was evicted twice, the last one.

    Raises:
        ValueError: if there are none.
    """
    with path.open(errors="replace") as lines:
        # Line by line: such a log can be larger than memory should be.
        found = {one.request: one for line in lines if "KV eviction" in line for one in parse_evictions(line)}
    if not found:
        raise ValueError(f"{path} has no line on an eviction: was it written with VLLM_LOGGING_LEVEL=DEBUG?")
    return found


def kept_shares(
    results: Iterable[Result], evictions: Mapping[str, Eviction], budget: float
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
