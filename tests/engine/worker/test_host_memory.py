"""On a CPU vLLM asks for half of the memory that is free, where the user does not say how much."""

from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig

from vllm_kvevict.engine.worker import host_memory
from vllm_kvevict.engine.worker.host_memory import ask_for_half_of_what_is_free


def asked(monkeypatch: pytest.MonkeyPatch, *free: float, **said: float) -> float:
    """The share of the memory that vLLM asks for, where so much of each node is free."""
    monkeypatch.setattr(host_memory, "get_visible_memory_node", lambda: list(range(len(free))))
    nodes = [SimpleNamespace(total_memory=1000, available_memory=1000 * share) for share in free]
    monkeypatch.setattr(host_memory, "get_memory_node_info", nodes.__getitem__)
    cache = CacheConfig(**said)
    ask_for_half_of_what_is_free(cache)
    return cache.gpu_memory_utilization


def test_half_of_what_is_free(monkeypatch):
    assert asked(monkeypatch, 0.8) == pytest.approx(0.4)
    assert asked(monkeypatch, 1.0, 0.6) == pytest.approx(0.3)


def test_what_the_user_says_comes_first(monkeypatch):
    assert asked(monkeypatch, 0.5, gpu_memory_utilization=0.7) == 0.7
    assert asked(monkeypatch, 0.5, kv_cache_memory_bytes=1 << 30) == CacheConfig().gpu_memory_utilization
