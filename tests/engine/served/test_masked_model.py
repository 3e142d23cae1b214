"""With eviction, logits equal those of a plain model that cannot see the evicted entries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.support.masked import check_logits
from tests.engine.support.running import Answer, Ask, engine, evicting_engine, run
from vllm_kvevict.policies import available

EVICTING = [policy for policy in available() if policy != "full"]


def check(
    model: Path,
    asks: Sequence[Ask],
    answers: Sequence[Answer],
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> None:
    """The exact number of entries that each keeps, and logits against the plain model's."""
    for ask, answer in zip(asks, answers, strict=True):
        config = ask.config() if ask.policy != "full" else None
        if config is not None and config.evicts(ask.evicted_to):
            rows = [row for heads in answer.kept[0].values() for row in heads]
            assert sum(map(len, rows)) == len(rows) * config.budget_for(ask.evicted_to)
        else:
            assert not answer.kept
        check_logits(model, ask, answer, dtype=dtype, **settings)


@pytest.mark.engine
@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_policy_and_group_size(models, group):
    model = models("llama", heads=4, kv_heads=4 // group)
    asks = [Ask(300, policy, 0.2, seed=i) for i, policy in enumerate(EVICTING)]
    asks += [Ask(200, policy, 0.3, prefix_len=150, seed=i) for i, policy in enumerate(EVICTING)]
    # Edges around the window (32) and an absolute budget of 48 tokens; of the other groups, a prompt that is shorter
    # than the window, and the first that is evicted.
    edges = (1, 31, 32, 33, 47, 48, 49, 400) if group == 2 else (31, 49)
    asks += [
        Ask(length, policy, 48.0, max_tokens=4)
        for policy in EVICTING
        if policy != "compactor"
        for length in edges
    ]
    # Its window has 64 tokens, beside 16 that stay as well.
    edges = (1, 64, 80, 95, 96, 97, 400) if group == 2 else (64, 97)
    asks += [Ask(length, "compactor", 96.0, max_tokens=4) for length in edges]
    asks.append(Ask(250, "full"))
    with evicting_engine(model) as llm:
        answers = run(llm, asks, logits=True)
    check(model, asks, answers)


@pytest.mark.engine
def test_without_our_kernels(models):
    model = models("llama")
    asks = [Ask(300, "ada-snapkv", 0.2), Ask(200, "snapkv", 0.3), Ask(120, "full")]
    with evicting_engine(model, eviction={"kernels": False}) as llm:
        answers = run(llm, asks, logits=True)
    check(model, asks, answers)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3", "mixtral", "llama"])
def test_models(models, architecture, dtype):
    model = models(architecture)
    asks = [Ask(300, "ada-snapkv", 0.2), Ask(200, "ada-pyramid", 0.3, prefix_len=150), Ask(120, "full")]
    # bf16 rounds hidden states differently in the two implementations; logits of these models reach about 3.
    tolerance = {} if dtype == "float32" else {"atol": 0.15, "rtol": 0.05}
    with evicting_engine(model, dtype=dtype) as llm:
        answers = run(llm, asks, logits=True)
    check(model, asks, answers, getattr(torch, dtype), **tolerance)


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["mistral", "phi3"])
def test_a_sliding_window_that_no_request_reaches(models, architecture):
    windowed = models(architecture, sliding_window=512)
    settings = {"max_model_len": 512, "max_num_batched_tokens": 512}
    asks = [Ask(480, "full", max_tokens=32), Ask(480, "ada-snapkv", 1.0, max_tokens=32)]
    with engine(windowed, **settings) as llm:
        (stock,) = run(llm, asks[:1], recorded=False)
    with evicting_engine(windowed, **settings) as llm:
        full, whole = run(llm, asks)
        evicted = Ask(480, "ada-snapkv", 0.3, max_tokens=16)
        answers = run(llm, [evicted], logits=True)
    assert full.tokens == whole.tokens == stock.tokens
    check(models(architecture), [evicted], answers)
    # A window that requests do reach changes what is said.
    with engine(models(architecture, sliding_window=64), **settings) as llm:
        (narrow,) = run(llm, asks[:1], recorded=False)
    assert narrow.tokens != stock.tokens
