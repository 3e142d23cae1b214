"""Defaults for every test, set before anything imports vLLM or transformers. Values from outside win."""

import gc
import os

import pytest

from tests import durations, more

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests build their models; none is downloaded
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Threads that wait for each other cost more than they bring on models this small, and workers are forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # it drafts, and gives OpenMP as many, whatever that was told
os.environ.setdefault("VLLM_KVEVICT_CHECK", "1")  # compare ledger and worker after every step


gc.disable()  # what is imported stays, and is not looked through meanwhile


def pytest_itemcollected(item: pytest.Item) -> None:
    starts_engine = item.get_closest_marker("engine") is not None
    if more.is_more(item.nodeid, starts_engine):
        item.add_marker("more")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest first. Which tests are left out is known by then."""
    items[:] = [items[place] for place in durations.longest_first([item.nodeid for item in items])]


def pytest_collection_finish() -> None:
    """To look through it for garbage takes longer than many a test."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that are unloaded count what is left of theirs
