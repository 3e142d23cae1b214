"""One engine with eviction in a process at a time: a second is refused, but for one that is gone or never came up."""

import gc
import os

import pytest
from vllm import LLM, EngineArgs

from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.engine import process
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.worker import runtime

SMALL = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 24}
REFUSAL = (
    r"^--kv-eviction: another engine .* already runs in this process, so end it first or give each a process"
)
ASKS = [Ask(300, "snapkv", 0.2, max_tokens=8)]


@pytest.mark.engine
def test_a_second_engine_is_refused_and_the_first_goes_on(model):
    with evicting_engine(model, **SMALL) as first:
        expected = run(first, ASKS)
        with pytest.raises(KVEvictionError, match=REFUSAL), evicting_engine(model, **SMALL):
            pass
        again = run(first, ASKS)
    assert (again[0].tokens, again[0].kept) == (expected[0].tokens, expected[0].kept)
    with evicting_engine(model, **SMALL) as second:
        assert run(second, ASKS)[0].tokens == expected[0].tokens


@pytest.mark.engine
def test_an_engine_that_was_dropped_does_not_count(model):
    """Without being shut down, and before the collector has come round to it."""
    settings = {**SMALL, "dtype": "float32", "enforce_eager": True}
    options = {"kv_eviction": {"policy": "full", "min_prompt": 0}}
    gc.disable()
    try:
        first = LLM(str(model), additional_config=options, max_logprobs=-1, **settings)
        expected = run(first, ASKS, recorded=False)
        first.myself = first
        del first
        with evicting_engine(model, **SMALL) as second:
            assert run(second, ASKS)[0].tokens == expected[0].tokens
    finally:
        gc.enable()


@pytest.mark.engine
def test_an_engine_that_did_not_come_up_does_not_count(model, monkeypatch):
    """Even while its traceback, which holds all of it, is at hand."""

    def fail(ledger, capacity):
        raise ValueError("does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(PageLedger, "set_capacity", fail)
        with pytest.raises(ValueError, match="does not fit") as error, evicting_engine(model, **SMALL):
            pass
    with evicting_engine(model, **SMALL) as llm:
        assert len(run(llm, ASKS)[0].tokens) == 8
    assert error.traceback


class Worker:
    """As much of vLLM's worker as a runtime looks at."""

    def __init__(self, vllm_config):
        self.vllm_config, self.model_runner = vllm_config, None


def test_a_process_that_was_forked_has_none_of_its_parents_engines(model, monkeypatch):
    vllm_config = EngineArgs(str(model), kv_eviction="snapkv").create_engine_config()
    parent, child = Worker(vllm_config), Worker(vllm_config)
    runtime.start_runtime(parent)
    try:
        process.mark_started()
        with pytest.raises(KVEvictionError, match=REFUSAL):
            process.check_alone()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            process.check_alone()
        # Who was refused takes nothing away when it ends.
        runtime.stop_runtime(child)
        assert runtime.get_runtime().runner is None
    finally:
        runtime.stop_runtime(parent)
    process.check_alone()
