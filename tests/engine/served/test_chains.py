"""A conversation goes on from what earlier turns have left of it, and says what it would say had it read all of it."""

from typing import Any

import pytest
import torch

from tests.engine.served.test_cached_prefixes import SERVERS
from tests.engine.support.answers import CLOSE
from tests.engine.support.conversations import conversation, found_by
from tests.engine.support.hits_and_misses import aborted_after, metric
from tests.engine.support.running import (
    Answer,
    evicting_engine,
    num_preemptions,
    run,
    run_preempted,
)
from tests.engine.support.v2_runner import NewProcess
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.policies.registry import policies_for_parts

ABLE = [policy for policy in policies_for_parts() if policy != "full"]
OF_EACH_SCHEDULE = ("ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "h2o")
OPTIONS = {"min_turn": 16, "check": True}
BASE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def model(models):
    return models("llama", heads=8, kv_heads=4, layers=4)


@pytest.fixture(scope="module")
def read(model):
    """What each request says that reads its whole prompt, by policy."""
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "enable_prefix_caching": False}) as llm:
        return {
            policy: run(llm, conversation(policy, seed), logits=True, recorded=False)
            for seed, policy in enumerate(ABLE)
        }


def check(answers: list[Answer], expected: list[Answer]) -> None:
    for index, (answer, one) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == one.tokens, index
        if len(answer.logits):
            torch.testing.assert_close(answer.logits, one.logits, **CLOSE)


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_hits_say_what_misses_say(name: str, model, read, monkeypatch) -> None:
    """Turn by turn, then all at once again, and all at once after a reset, when some wait for others; without tails."""
    monkeypatch.setattr(Tails, "part_from", lambda tails, request, account, untold: None)
    is_whole = name == "whole"
    policies = ABLE if is_whole else OF_EACH_SCHEDULE if name == "chunks" else ("ada-snapkv", "lava", "kvzip")
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, **SERVERS[name]}) as llm:
        for policy in policies:
            asks, before = conversation(policy, ABLE.index(policy)), metric(llm, "prefix_cache_hits")
            check([run(llm, [ask], logits=is_whole, recorded=False)[0] for ask in asks], read[policy])
            assert metric(llm, "prefix_cache_hits") - before == found_by(asks)
            before = metric(llm, "prefix_cache_hits")
            check(run(llm, asks, logits=is_whole, recorded=False), read[policy])
            assert metric(llm, "prefix_cache_hits") - before == sum(ask.turns[-1] for ask in asks)
        for policy in policies[:3]:
            assert llm.reset_prefix_cache()
            check(
                run(llm, conversation(policy, ABLE.index(policy)), logits=is_whole, recorded=False),
                read[policy],
            )
        assert num_preemptions(llm) == 0


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip", "h2o"])
def test_preempted(model, read, policy: str) -> None:
    """All at once in small steps, thrown out and begun anew with nothing cached; then again, when all is."""
    asks = conversation(policy, ABLE.index(policy))
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 96}) as llm:
        for at in (1, 3, 6, 9, 13):
            check(run_preempted(llm, asks, at), read[policy])
            check(run(llm, asks, recorded=False), read[policy])
            assert llm.reset_prefix_cache()
        assert num_preemptions(llm) >= 5


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_a_reader_that_goes(model, read, policy: str) -> None:
    """The second of two requests that share three parts, whatever the first has left of them by then."""
    first, second = conversation(policy, ABLE.index(policy))[4:6]
    aborts = 0
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 64}) as llm:
        for steps in range(16):
            tokens, was_aborted = aborted_after(llm, first, second, steps)
            assert tokens == read[policy][5].tokens, steps
            aborts += was_aborted
            assert llm.reset_prefix_cache()
    assert aborts >= 10


@pytest.mark.engine
def test_a_pool_for_one_conversation(model, read) -> None:
    """What is left goes to make room, the ends of chains first, and what is borrowed stays."""
    settings = {**BASE, "max_model_len": 700, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 7}
    with evicting_engine(model, eviction={**OPTIONS, "decode_reserve": 1}, **settings) as llm:
        for policy in OF_EACH_SCHEDULE:
            asks = conversation(policy, ABLE.index(policy))
            check([run(llm, [ask], recorded=False)[0] for ask in asks], read[policy])
            check(run(llm, asks, recorded=False), read[policy])
        assert metric(llm, "kv_eviction_cache_drops") > 10
        assert metric(llm, "prefix_cache_hits") > 3000


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.engine
def test_drafts(model, read) -> None:
    with evicting_engine(model, eviction=OPTIONS, **BASE, speculative_config=NGRAM) as llm:
        for policy in OF_EACH_SCHEDULE:
            asks = conversation(policy, ABLE.index(policy))
            answers = [run(llm, [ask], recorded=False)[0] for ask in asks]
            assert [answer.tokens for answer in answers] == [one.tokens for one in read[policy]]
        assert metric(llm, "spec_decode_num_accepted_tokens") > 20


@pytest.fixture(scope="module")
def second(model, tmp_path_factory):
    """By vLLM's V2 model runner, scheduled ahead, in the background."""
    case = {"model": model, "eviction": OPTIONS, **BASE, "ahead": True}
    policies = ("ada-snapkv", "kvzip")
    batches = [[ask] for policy in policies for ask in conversation(policy, ABLE.index(policy))]
    process = NewProcess(
        tmp_path_factory.mktemp("v2"),
        [
            {**case, "batches": batches},
            {
                **case,
                "batches": [conversation("lava", ABLE.index("lava"))] * 2,
                "pipeline_parallel_size": 2,
                "max_num_batched_tokens": 96,
            },
        ],
    )
    yield process
    process.stop()


@pytest.mark.engine
def test_the_other_runner_ahead(second, read) -> None:
    (one_by_one, *_, found, _), (at_once, *_) = second.result()
    expected = [*read["ada-snapkv"], *read["kvzip"]]
    assert [answers[0].tokens for answers in one_by_one] == [one.tokens for one in expected]
    assert found > found_by(conversation("ada-snapkv")) + found_by(conversation("kvzip"))
    for answers in at_once:
        assert [answer.tokens for answer in answers] == [one.tokens for one in read["lava"]]
