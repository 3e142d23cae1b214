"""Nothing evicted: greedy tokens equal those of vLLM without the flag."""

import pytest

from tests.engine.support.running import Ask, engine, evicting_engine, num_preemptions, run, tokens_of

LENGTHS = (300, 31, 500, 700, 33, 64)
TOKENS = 64


def _asks(policy="full", budget=None):
    return [Ask(length, policy, budget, max_tokens=TOKENS) for length in LENGTHS]


@pytest.fixture(scope="module")
def stock(model):
    with engine(model) as llm:
        return tokens_of(run(llm, _asks(), recorded=False))


@pytest.mark.engine
def test_budget_one_and_full(model, stock):
    with evicting_engine(model) as llm:
        assert tokens_of(run(llm, _asks())) == stock
        assert tokens_of(run(llm, _asks("ada-snapkv", 1.0))) == stock
        # A budget that no prompt exceeds keeps everything, too; a small one does not.
        assert tokens_of(run(llm, _asks("snapkv", 700.0))) == stock
        assert tokens_of(run(llm, _asks("ada-snapkv", 0.2))) != stock


@pytest.mark.engine
def test_an_engine_without_the_flag_in_the_same_process(model, stock):
    with evicting_engine(model, eviction={"policy": "snapkv", "budget": 0.2}) as llm:
        run(llm, _asks("snapkv", 0.2))
    with engine(model) as plain:
        assert tokens_of(run(plain, _asks(), recorded=False)) == stock


@pytest.mark.engine
def test_preempted_and_chunked(model, stock):
    blocks = 2048 // 128 + 1
    settings = {"num_gpu_blocks_override": blocks, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    with evicting_engine(model, **settings, eviction={"decode_reserve": 1, "min_prompt": 256}) as llm:
        # As many requests again crowd the pool until somebody is thrown out.
        crowd = [Ask(400, max_tokens=200, seed=seed) for seed in range(1, 5)]
        answers = run(llm, [*_asks(), *crowd])
        assert num_preemptions(llm) > 0
    assert tokens_of(answers[: len(LENGTHS)]) == stock


@pytest.mark.engine
def test_compiled(model, stock):
    with evicting_engine(model, enforce_eager=False) as llm:
        assert tokens_of(run(llm, _asks())) == stock
        assert tokens_of(run(llm, _asks("snapkv", 1.0))) == stock
