"""Prompts that our kernel reads, whole, in chunks and layer by layer, against a plain model that sees the same."""

from typing import Any

import pytest

from tests.engine.support.masked import check_logits
from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.engine.worker import cpu
from vllm_kvevict.kernels.prefill_attention import PrefillAttention

ASKS = [
    Ask(700, "full"),
    Ask(700, "ada-snapkv", 0.2, max_tokens=4, seed=1),
    Ask(300, "snapkv", 0.3, prefix_len=200, seed=2),
    Ask(15, "full", seed=3),
]
REPEATED = Ask(600, "kvzip", 0.3, max_tokens=4, seed=4)
"""Its prompt is read twice."""


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool]]:
    """Calls of the kernel, which is used whatever it takes: tokens and whether there are prefixes."""
    seen: list[tuple[int, bool]] = []
    attend = PrefillAttention.__call__

    def watched(kernel: Any, query: Any, key: Any, value: Any, output: Any, new: Any, rows: Any, *rest: Any):
        behind = rows is not None and bool((rows.lengths[rows.request_slots, rows.first] > new).any())
        seen.append((int(new.sum()), behind))
        attend(kernel, query, key, value, output, new, rows, *rest)

    monkeypatch.setattr(PrefillAttention, "__call__", watched)
    monkeypatch.setattr(cpu, "_is_faster", lambda *_: True)
    return seen


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture, step", [("llama", 2048), ("llama", 128), ("gpt_oss", 128), ("gemma2", 128)]
)
def test_logits_equal_those_of_a_plain_model(models, calls, architecture, step):
    """Two of the models have sinks or capped logits, and layers that stay with vLLM, so that nothing is read twice."""
    model = models(architecture)
    asks = [*ASKS, REPEATED] if architecture == "llama" else ASKS
    with evicting_engine(model, max_num_batched_tokens=step) as llm:
        answers = run(llm, asks, logits=True)
    assert any(behind for _, behind in calls) and not all(behind for _, behind in calls)
    assert min(tokens for tokens, _ in calls) >= 16
    for ask, answer in zip(asks, answers, strict=True):
        check_logits(model, ask, answer)


@pytest.mark.engine
def test_without_our_kernels_it_is_not_called(models, calls):
    with evicting_engine(models("llama"), eviction={"kernels": False}) as llm:
        run(llm, ASKS)
    assert calls == []
