"""What is kept does not depend on chunks, batch mates, preemption, or on how many workers share the model."""

import pytest
import torch

from tests.engine.support.running import Answer, Ask, evicting_engine, metric, num_preemptions, run
from vllm_kvevict.policies import available

EVICTING = [policy for policy in available() if policy != "full"]
ASKS = [Ask(300, policy, 0.2, seed=i) for i, policy in enumerate(EVICTING)] + [
    Ask(170, "ada-snapkv", 0.3, prefix_len=140),
    Ask(410, "lava", 0.3, prefix_len=140),
    Ask(90, "snapkv", 48.0),
    Ask(260, "full"),
]
SMALL = {"max_num_seqs": 16, "max_model_len": 1024}


@pytest.fixture(scope="module")
def baseline(model):
    with evicting_engine(model, **SMALL, max_num_batched_tokens=1024) as llm:
        return run(llm, ASKS)


def _same(ask: Ask, one: Answer, other: Answer) -> None:
    """Equal decisions, up to entries whose scores lie within 1e-5 of the cut."""
    assert len(one.kept) == len(other.kept)
    for mine, theirs, scores in zip(one.kept, other.kept, one.scores, strict=True):
        assert mine.keys() == theirs.keys()
        for layer in mine:
            sizes = sum(map(len, mine[layer]))
            assert sum(map(len, theirs[layer])) == sizes
            swapped = [set(a) ^ set(b) for a, b in zip(mine[layer], theirs[layer], strict=True)]
            if any(swapped):
                near = torch.cat([scores[layer][h, list(s)] for h, s in enumerate(swapped) if s])
                cut = near.median()
                assert ((near - cut).abs() <= 1e-5 * cut.abs()).all(), (ask, layer, swapped)
    assert one.tokens == other.tokens


def _all_same(asks: list[Ask], expected: list[Answer], answers: list[Answer]) -> None:
    for ask, one, other in zip(asks, expected, answers, strict=True):
        _same(ask, one, other)


LAYOUTS: dict[str, dict[str, int]] = {
    "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 128": {"max_num_batched_tokens": 128},
    "TP 2": {"max_num_batched_tokens": 128, "tensor_parallel_size": 2},
    "PP 2": {"max_num_batched_tokens": 128, "pipeline_parallel_size": 2},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_and_workers(model, baseline, name):
    with evicting_engine(model, **SMALL, **LAYOUTS[name]) as llm:
        answers = run(llm, ASKS)
    _all_same(ASKS, baseline, answers)


@pytest.mark.engine
def test_batch_mates(model, baseline):
    with evicting_engine(model, **SMALL, max_num_batched_tokens=1024) as llm:
        _all_same(ASKS, baseline, [run(llm, [ask])[0] for ask in ASKS])


@pytest.mark.engine
def test_replicated_heads(models):
    """More tensor-parallel ranks than KV heads: both ranks of a head choose the same, and it counts once."""
    model = models("llama", heads=4, kv_heads=1)
    asks = [*ASKS[:3], *(ask for ask in ASKS if ask.policy in ("compactor", "expected-attention"))]
    with evicting_engine(model, **SMALL) as llm:
        expected, evicted = run(llm, asks), metric(llm, "kv_eviction_evicted_tokens")
    with evicting_engine(model, **SMALL, tensor_parallel_size=2) as llm:
        answers = run(llm, asks)
        assert metric(llm, "kv_eviction_evicted_tokens") == evicted > 0
    _all_same(asks, expected, answers)


@pytest.mark.engine
def test_preemption(model):
    # The pool holds one request of max_model_len, and admission expects far less output than there will be.
    asks = [Ask(300, policy, 0.2, seed=i, max_tokens=200) for i, policy in enumerate(EVICTING)]
    settings = {**SMALL, "max_num_batched_tokens": 128, "eviction": {"decode_reserve": 8}}
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, asks)
    blocks = SMALL["max_model_len"] // 128 + 1  # vLLM sets one aside
    with evicting_engine(model, **settings, num_gpu_blocks_override=blocks) as llm:
        answers = run(llm, asks)
        assert num_preemptions(llm) > 0
    assert any(len(answer.kept) > 1 for answer in answers)
    for ask, one, other in zip(asks, expected, answers, strict=True):
        for again, scores in zip(other.kept, other.scores, strict=True):
            _same(ask, one, Answer(other.tokens, other.logits, [again], [scores]))
