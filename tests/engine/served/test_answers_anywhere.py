"""What is kept of an answer does not depend on ranks, chunks, batch mates, runners, drafts, or what else is served."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.answers import Rules
from tests.engine.support.masked import CLOSE, expected_logits
from tests.engine.support.running import (
    Answer,
    Ask,
    assert_same,
    evicting_engine,
    metric,
    num_preemptions,
    run,
    run_preempted,
)

RULES = Rules(20, 12, 8)
SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "max_num_batched_tokens": 512}
TAKE = {"policy": "take", "budget": 48, "take_chunk": 64, "take_probe": 16, "take_alpha": 0.3}
OPTIONS = RULES.options("ada-snapkv", **TAKE)
LOOKAHEAD = {"policy": "ada-snapkv", "budget": 0.3, "lookahead": 12, "check": True}
ASKS = [
    Ask(70, max_tokens=60),
    Ask(150, "ada-snapkv", 0.3, max_tokens=60, seed=1),
    Ask(120, "lava", 0.3, prefix_len=90, max_tokens=60, seed=2),
    Ask(64, max_tokens=60, decode_budget=30, seed=3),
    Ask(100, "snapkv", 0.4, max_tokens=48, decode_budget=0, seed=4),
    Ask(110, "kvzip", 0.3, prefix_len=100, max_tokens=46, seed=5),
    Ask(160, "take", max_tokens=46, seed=6),
    Ask(75, max_tokens=RULES.budget + RULES.interval, seed=7),
    Ask(160, "kvzip", 0.3, turns=(50, 90, 150), max_tokens=46, seed=8),
    Ask(140, "ada-snapkv", 0.3, turns=(60, 140), max_tokens=46, seed=9),
    Ask(150, "lava", 0.3, turns=(40, 90, 135), max_tokens=46, seed=10),
]
PROMPT_POSITIONS = {6: (64, 128, 160), 8: (50, 90, 150), 9: (60, 140), 10: (40, 90, 135)}
"""Of requests whose prompts are evicted more than once."""


@pytest.fixture(scope="module")
def expected(model):
    """All at once, in whole steps; the plain model says the same if it sees what was kept, and only then."""
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        answers = run(llm, ASKS, logits=True)
    RULES.check(model, ASKS, answers, PROMPT_POSITIONS)
    assert [len(RULES.positions(ask)) for ask in ASKS] == [3, 3, 3, 2, 0, 2, 2, 0, 2, 2, 2]
    for ask, answer in ((ASKS[0], answers[0]), (ASKS[1], answers[1])):
        prompts, _ = RULES.split(ask, answer)
        blind = expected_logits(model, ask, dataclasses.replace(answer, kept=prompts))
        first = RULES.budget + RULES.interval
        torch.testing.assert_close(answer.logits[:first], blind[:first], **CLOSE)
        assert not torch.allclose(answer.logits[first + 1 :], blind[first + 1 :], **CLOSE)
    return answers


SERVERS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "PP 2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 128},
    "small steps": {"max_num_batched_tokens": 33, "max_num_seqs": 3},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_servers(model, expected, name: str, tmp_path) -> None:
    log = tmp_path / "log"
    options = {**OPTIONS, "eviction_log": str(log)}
    with evicting_engine(model, eviction=options, **{**SMALL, **SERVERS[name]}) as llm:
        answers = run(llm, ASKS)
        assert num_preemptions(llm) == 0
        score(llm, ASKS[2], answers[2])
    assert_same(expected, answers)
    # A step may decide what is kept of the prefix, if stages do that together, and then evict the answer.
    told = [(one["policy"], one["tokens"]) for one in map(json.loads, log.read_text().splitlines())]
    assert told[-4:] == [("lava", 90), *(("ada-snapkv", tokens) for tokens in RULES.positions(ASKS[2]))]


def score(llm, ask: Ask, answer: Answer) -> None:
    """Send an answer again as a prompt, as far as it was stored."""
    fields = {**ask.sampling(False).extra_args, "kv_answer_from": ask.length}
    prompt = {"prompt_token_ids": [*ask.prompt, *answer.tokens[:-1]]}
    llm.generate([prompt], SamplingParams(max_tokens=1, extra_args=fields), use_tqdm=False)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "evictions"), [(RULES.options("ada-snapkv"), 11), (LOOKAHEAD, 2)], ids=["answer", "lookahead"]
)
def test_ranks_that_share_a_kv_head(models, options: dict[str, Any], evictions: int) -> None:
    model, answers = models("llama", heads=4, kv_heads=1), []
    asks = [*ASKS[:2], dataclasses.replace(ASKS[1], policy="ada-criticalkv")]
    for ranks in (1, 2):
        with evicting_engine(model, eviction=options, **SMALL, tensor_parallel_size=ranks) as llm:
            answers.append(run(llm, asks))
            assert metric(llm, "kv_eviction_evictions") == evictions
    assert_same(*answers)


@pytest.mark.engine
def test_after_a_lookahead(models) -> None:
    """Prompts are evicted at tokens of their answers, and these later, by queries that take turns in the ring."""
    model = models("llama", heads=4, kv_heads=2, layers=4)
    options = RULES.options("ada-snapkv", policy="lava", budget=0.3, lookahead=12)
    policies = ("kvzip", "lava", "ada-snapkv", "knorm", "dropkv")
    asks = [Ask(90 + 17 * i, name, 0.3, max_tokens=60, seed=i) for i, name in enumerate(policies)]
    with evicting_engine(model, eviction=options, **SMALL) as llm:
        answers = run(llm, asks, logits=True)
    RULES.check(model, asks, answers, {i: (ask.length + 12,) for i, ask in enumerate(asks)})
    with evicting_engine(model, eviction=options, **{**SMALL, **SERVERS["PP 2"]}) as llm:
        assert_same(answers, run(llm, asks))
    with evicting_engine(model, eviction=options, **{**SMALL, **SERVERS["small steps"]}) as llm:
        for ask, one in zip(asks, answers, strict=True):
            (again,) = run_preempted(llm, [ask], 5, 40, recorded=True)
            assert again.tokens == one.tokens and again.kept[-1] == one.kept[-1]


@pytest.mark.engine
def test_alone_and_preempted_in_small_steps(model, expected) -> None:
    """Each alone, thrown out between its evictions and read again in pieces that end at every one of them."""
    settings, times = {**SMALL, "max_num_batched_tokens": 33}, list[int]()
    with evicting_engine(model, eviction=OPTIONS, **settings) as llm:
        for ask, one in zip(ASKS, expected, strict=True):
            before = num_preemptions(llm)
            (answer,) = run_preempted(llm, [ask], 27, 51, recorded=True)
            times.append(num_preemptions(llm) - before)
            assert answer.tokens == one.tokens, ask
            if evictions := RULES.positions(ask):
                assert answer.kept[-1] == one.kept[-1]
                assert len(answer.kept) > len(one.kept) or len(evictions) < 3
    assert min(times) == 1 and max(times) == 2


@pytest.mark.engine
def test_an_interval_of_one(model) -> None:
    """Every token evicts; with a window as wide as an interval is not."""
    rules = Rules(10, 1, 8)
    asks = [Ask(40, max_tokens=16), Ask(80, "snapkv", 0.4, max_tokens=16, seed=1)]
    for policy in ("ada-snapkv", "streaming-llm"):
        with evicting_engine(model, eviction=rules.options(policy), **SMALL) as llm:
            answers = run(llm, asks, logits=True)
        assert [len(rules.positions(ask)) for ask in asks] == [5, 5]
        rules.check(model, asks, answers)


@pytest.mark.engine
def test_drafts(model, expected) -> None:
    with evicting_engine(model, eviction=OPTIONS, **SMALL, speculative_config=NGRAM) as llm:
        answers = run(llm, ASKS)
        accepted = metric(llm, "spec_decode_num_accepted_tokens")
        assert accepted > 20 and metric(llm, "spec_decode_num_draft_tokens") - accepted > 20
    assert_same(expected, answers)


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gemma3_text", "granitemoehybrid"])
def test_models_of_which_some_layers_are_evicted(models, architecture: str) -> None:
    """Layers with a window, or a state, stay as they are; what the others keep is what the plain model sees."""
    model = models(architecture)
    asks = [dataclasses.replace(ask, adapter=None) for ask in ASKS[:2]]
    with evicting_engine(model, eviction=RULES.options("ada-snapkv"), **SMALL) as llm:
        answers = run(llm, asks, logits=True)
    RULES.check(model, asks, answers)
