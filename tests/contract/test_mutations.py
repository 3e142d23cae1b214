"""The contract can fail: seams are moved in a copy of vLLM's source, and the test that guards each must say so."""

import ast
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract import source, test_behaviour, test_signatures

MANAGER = "vllm.v1.core.kv_cache_manager"
SCHEDULER = "vllm.v1.core.sched.scheduler"

MUTATIONS: dict[str, tuple[str, str, str, Callable[..., Any], list[Any], str]] = {
    # module, what stands there, what shall, the test and its arguments, what it must say
    "method-gone": (
        SCHEDULER,
        "def _reserve_prefill_lookahead",
        "def _reserve_lookahead",
        test_signatures.test_what_we_override_is_there_and_takes_no_more,
        [("scheduler/scheduler.py", "EvictionScheduler")],
        "scheduler.py and .*:Scheduler differ in _reserve_prefill_lookahead",
    ),
    "parameter-added": (
        MANAGER,
        "def free(self, request: Request)",
        "def free(self, request: Request, now: bool)",
        test_signatures.test_what_we_override_is_there_and_takes_no_more,
        [("scheduler/ledger.py", "PageLedger")],
        r"free takes \(request, now\), ours \(self, request: Request\)",
    ),
    "keyword-renamed": (
        "vllm.v1.attention.ops.triton_unified_attention",
        "softmax_scale",
        "scale",
        test_signatures.test_call_is_accepted,
        ["vllm.v1.attention.ops.triton_unified_attention:unified_attention"],
        "unified_attention takes no softmax_scale",
    ),
    "call-gone": (
        "vllm.v1.worker.gpu.kv_connector",
        "self.kv_connector.build_connector_worker_meta()",
        "None",
        test_behaviour.test_calls,
        ["report-after-forward-v2"],
        "does not call .* in this order: a step's reports come with the next one",
    ),
    "new-question": (
        SCHEDULER,
        "self.kv_cache_manager.take_events()",
        "self.kv_cache_manager.take_all_events()",
        test_behaviour.test_scheduler_asks_the_manager_nothing_new,
        ["scheduler"],
        "asks the block manager for take_all_events: the ledger is bypassed",
    ),
    "source-changed": (
        "vllm.v1.worker.utils",
        "assert len(sizes) == 1",
        "assert len(sizes) > 0",
        test_behaviour.test_source_says,
        ["one-allocation"],
        "has no longer `assert len.sizes. == 1`: the pool is no longer one piece",
    ),
    "rotary-embedding-left-out": (
        "vllm.model_executor.models.exaone4",
        "if self.sliding_window or self.apply_rope_all_layers:",
        "if self.sliding_window or self.rope_everywhere:",
        test_behaviour.test_layers_that_hold_a_rotary_embedding_and_do_not_use_it_are_known,
        [],
        r"Exaone4Attention turns queries and keys by \['rope_everywhere', 'sliding_window'\]: compactor",
    ),
}


def _only_elsewhere(reason: str) -> None:
    """Leave a mutation out, unless this is a vLLM that the engine supports."""
    assert not source.is_supported(), reason
    pytest.skip(reason)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_moved_seam_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module, before, after, test, arguments, says = MUTATIONS[name]
    original, file = source.tree, source.module_file(module)
    text = file.read_text(encoding="utf-8") if file else ""
    if before not in text:
        _only_elsewhere("this vLLM has other text there")
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(before, after), encoding="utf-8")
    try:
        test(*arguments)
    except pytest.fail.Exception:
        _only_elsewhere("this vLLM has moved the seam already")
    files = source.module_file
    monkeypatch.setattr(source, "module_file", lambda x: changed if x == module else files(x))
    monkeypatch.setattr(
        source, "tree", lambda x: ast.parse(changed.read_text()) if x == module else original(x)
    )
    with pytest.raises(pytest.fail.Exception, match=says):
        test(*arguments)
