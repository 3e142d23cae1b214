"""A request that begins with uncompressed cached tokens keeps and says what it would, had it read them itself."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.served.test_cached_prefixes import SERVERS
from tests.engine.support.hits_and_misses import BASE, metric
from tests.engine.support.running import VOCAB, Answer, Ask, engine, evicting_engine, run
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.schedules.plan import Plan

BLOCK = 128
"""Of vLLM on a CPU."""

DOCUMENT = 300
"""Tokens of a document."""

NEVER = ("take", "h2o", "compactor", "expected-attention")
"""Policies that must read their whole prompt."""


def tokens(seed: object, count: int) -> list[int]:
    choose = random.Random(str(seed))
    return [choose.randrange(8, VOCAB) for _ in range(count)]


@dataclass
class Question(Ask):
    """A document that ``seed`` decides, and a question of its own."""

    question: int = 0

    @property
    def prompt(self) -> list[int]:
        return (tokens(self.seed, DOCUMENT) + tokens((self.seed, self.question), 200))[: self.length]


def questions(policy: str, seed: int) -> list[Question]:
    """Two questions, and the document itself."""
    budget = None if policy == "full" else 0.3
    lengths = (DOCUMENT + 20, DOCUMENT + 60, DOCUMENT)
    return [Question(length, policy, budget, None, 4, seed, i) for i, length in enumerate(lengths)]


ASKED = {policy: questions(policy, seed) for seed, policy in enumerate(available())}


def most_found(ask: Question) -> int:
    """Tokens that a request finds once its document was read: whole blocks before the window."""
    if ask.policy in NEVER:
        return 0
    last = 1
    if ask.policy != "full":
        last = max(1, EvictionConfig(ask.policy, keep_ratio=0.3).window_for(ask.length))
    return min(DOCUMENT, ask.length - last) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def alone(model) -> dict[int, Answer]:
    """What each request says and keeps that reads its whole prompt, alone."""
    with evicting_engine(model, **BASE) as llm:
        every = [ask for asks in ASKED.values() for ask in asks]
        return {id(ask): run(llm, [ask], logits=True)[0] for ask in every}


def check(ask: Question, answer: Answer, expected: Answer) -> None:
    assert answer.tokens == expected.tokens and answer.kept == expected.kept, ask
    torch.testing.assert_close(answer.logits, expected.logits, atol=1e-4, rtol=1e-4)


OF_EACH_KIND = ("full", "ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "take", "h2o")
"""A policy of every schedule; on one rank and in whole steps all are asked."""


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_hits_keep_and_say_what_misses_do(name: str, model, alone) -> None:
    """Of every policy, three requests at once, of which two may wait for the first, then the same again."""
    with evicting_engine(model, **{**BASE, **SERVERS[name]}, enable_prefix_caching=True) as llm:
        for asks in [ASKED[policy] for policy in (available() if name == "whole" else OF_EACH_KIND)]:
            for again in (False, True):
                before = metric(llm, "prefix_cache_hits")
                for ask, answer in zip(asks, run(llm, asks, logits=True), strict=True):
                    check(ask, answer, alone[id(ask)])
                hits = metric(llm, "prefix_cache_hits") - before
                assert hits == sum(map(most_found, asks if again else asks[1:])), (asks[0].policy, again)
        assert metric(llm, "num_preemptions") == 0
        assert llm.reset_prefix_cache()
        run(llm, [Ask(20, max_tokens=1)], recorded=False)
        assert metric(llm, "kv_eviction_cached_uncompressed_pages") == 0


@pytest.mark.engine
def test_a_policy_that_sums_up_its_prompt_would_keep_something_else(model, alone, monkeypatch) -> None:
    """The control: were h2o let begin with cached tokens, it would miss their queries."""
    monkeypatch.setattr(Plan, "most_cached", lambda plan, tokens: tokens - 1)
    asks = ASKED["h2o"]
    with evicting_engine(model, **BASE, enable_prefix_caching=True) as llm:
        run(llm, asks[:1])
        (answer,) = run(llm, asks[1:2], logits=True)
    assert answer.kept != alone[id(asks[1])].kept


def update_weights(worker: Any) -> None:
    """Give a worker other weights."""
    torch.manual_seed(0)
    for weight in worker.model_runner.model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)


@pytest.mark.engine
@pytest.mark.parametrize(
    "fields", [{}, {"kv_eviction": "ada-snapkv", "kv_budget": 0.3}], ids=["full", "evicted"]
)
def test_what_is_read_with_old_weights_is_found_by_nobody(fields: dict[str, Any], model) -> None:
    """They change, and the cache is reset, while a prompt is being read."""
    settings = {**BASE, "max_num_batched_tokens": 128}
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args=fields or None)
    prompt: dict[str, Any] = {"prompt_token_ids": tokens("weights", 700)}
    with evicting_engine(model, **settings, enable_prefix_caching=True) as llm:
        reader = llm.llm_engine
        reader.add_request("reader", prompt, sampling)
        for _ in range(3):
            reader.step()
        llm.collective_rpc(update_weights)
        assert llm.reset_prefix_cache()
        while reader.has_unfinished_requests():
            reader.step()
        found, said = [], []
        for ask in (prompt, prompt, {**prompt, "cache_salt": "another"}):
            (output,) = llm.generate([ask], sampling, use_tqdm=False)
            found.append(output.num_cached_tokens)
            said.append(output.outputs[0].token_ids)
    assert found == [0, 640, 0] and said[0] == said[1] == said[2]


def chat(llm: Any, turns: int, **fields: Any) -> list[tuple[list[int], int]]:
    """A chat's answers, and the tokens that each turn found."""
    said, prompt = [], tokens("chat", 300)
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args=fields or None)
    for turn in range(turns):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        said.append((answer, output.num_cached_tokens))
        prompt = prompt + answer + tokens(("chat", turn), 90)
    return said


@pytest.mark.engine
def test_a_chat_of_full_is_a_chat_of_vllm(model) -> None:
    """Tokens, and the blocks that each turn finds, answers of earlier ones included."""
    with engine(model, **BASE, enable_prefix_caching=True) as llm:
        expected = chat(llm, 5)
    with evicting_engine(model, **BASE, enable_prefix_caching=True) as llm:
        assert chat(llm, 5, kv_eviction="full") == expected
        # Its blocks are there for every policy, until an evicted answer is another one.
        evicted = chat(llm, 2, kv_eviction="ada-snapkv", kv_budget=0.3)
        assert [found for _, found in evicted] == [256, 256]
    assert expected[-1][1] > 512


@pytest.mark.engine
def test_samples_of_one_prompt_read_it_once(model) -> None:
    sampling = SamplingParams(n=4, seed=7, temperature=1, max_tokens=8, ignore_eos=True)
    sampling.extra_args = {"kv_eviction": "ada-snapkv", "kv_budget": 0.3}
    said = {}
    for caching in (False, True):
        with evicting_engine(model, **BASE, enable_prefix_caching=caching) as llm:
            (output,) = llm.generate([{"prompt_token_ids": tokens(1, 600)}], sampling, use_tqdm=False)
            said[caching] = [list(sample.token_ids) for sample in output.outputs]
            assert metric(llm, "prefix_cache_hits") == 3 * 512 * caching
    assert said[True] == said[False] and len({tuple(sample) for sample in said[True]}) > 1
