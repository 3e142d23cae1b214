"""A request that begins with cached tokens says what it would, had it read them itself.

What is found is a compressed prefix, an uncompressed one, or turns of a conversation, whose first part may stay whole.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.support.conversations import SPOKEN, conversation, found_by, questions
from tests.engine.support.running import (
    CLOSE,
    Answer,
    Ask,
    assert_same,
    engine,
    evicting_engine,
    metric,
    num_preemptions,
    run,
)
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.kernels.layout import INT8
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.policies.registry import policies_for_parts
from vllm_kvevict.schedules.base import RankCapacity

OPTIONS = {"min_turn": 16, "check": True}
BASE: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}
CACHING = {**BASE, "enable_prefix_caching": True}
SERVERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 64},
    "TP 2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "PP 2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 128},
}
EIGHT_BITS: dict[str, dict[str, Any]] = {"8 bits": {"kv_cache_dtype": INT8}}
ROUNDED = {"atol": 2e-3, "rtol": 2e-3}
"""Where entries are rounded, the last bits of what is rounded decide of some; unrounded ones are 3e-3 away."""
EVICTING = [policy for policy in available() if policy != "full"]
ABLE = [policy for policy in policies_for_parts() if policy != "full"]
OF_EACH_SCHEDULE = ("full", "ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "take", "h2o")
"""What others are asked than a server with one rank and whole steps, which is asked all."""
DOCUMENT, BLOCK = 300, 128
"""Tokens of a document, and of vLLM's blocks on a CPU."""
WHOLE = SPOKEN[0][1]
"""Tokens of a first part that stays whole."""


@dataclass(frozen=True)
class Group:
    """Requests of one policy that begin alike.

    Attributes:
        first: tokens that they find when they are asked first.
        again: tokens that they find when all are asked again.
        is_led: whether they are asked one after the other at first; else at once, so that some wait for others.
    """

    asks: list[Ask]
    first: int
    again: int
    is_led: bool = False


def compressed(policy: str) -> Group:
    """Three questions about one prefix; the last has a single token, and one ends a page."""
    seed = EVICTING.index(policy)
    document = 200 - seed
    lengths = (document + 20, document + 56, document + 1)
    asks = questions(policy, seed, lengths, document, prefix_len=document, max_tokens=5)
    return Group(asks, 2 * document, 3 * document)


def uncompressed(policy: str) -> Group:
    """Two prompts that are evicted with their question in view, and their document itself."""
    lengths = (DOCUMENT + 20, DOCUMENT + 60, DOCUMENT)
    asks = questions(policy, available().index(policy), lengths, DOCUMENT, max_tokens=4)
    found = [most_found(ask) for ask in asks]
    return Group(asks, sum(found[1:]), sum(found))


def most_found(ask: Ask) -> int:
    """Tokens that a request finds once its document was read: whole blocks before the window."""
    if ask.policy in ("take", "h2o", "compactor", "expected-attention"):  # they must read all of their prompt
        return 0
    last = 1
    if ask.policy != "full":
        last = max(1, EvictionConfig(ask.policy, keep_ratio=0.3).window_for(ask.length))
    return min(DOCUMENT, ask.length - last) // BLOCK * BLOCK


def asked(policy: str, whole: int = 0) -> list[Ask]:
    return conversation(policy, ABLE.index(policy), whole=whole)


def turns(policy: str, whole: int = 0) -> Group:
    asks = asked(policy, whole)
    return Group(asks, found_by(asks), sum(ask.turns[-1] for ask in asks), is_led=True)


KINDS: dict[str, dict[str, Group]] = {
    "compressed": {policy: compressed(policy) for policy in EVICTING},
    "uncompressed": {policy: uncompressed(policy) for policy in available()},
    "turns": {policy: turns(policy) for policy in ABLE}
    | {f"{policy}, whole": turns(policy, WHOLE) for policy in ("ada-snapkv", "kvzip", "lava", "h2o")},
}
"""By what is found, requests of each policy."""


def chosen(name: str, kind: str) -> dict[str, Group]:
    """What a server is asked."""
    policies: Sequence[str] = OF_EACH_SCHEDULE
    if kind == "turns" and "2" in name:
        policies = ("ada-snapkv", "lava", "kvzip")
    is_all = name in ("whole", "8 bits")
    return {label: group for label, group in KINDS[kind].items() if is_all or label.split(",")[0] in policies}


@pytest.fixture(scope="module")
def read(model) -> Callable[[str], dict[tuple[str, str], list[Answer]]]:
    """What each request says and keeps that reads its whole prompt, by the type of the KV cache."""

    @functools.cache
    def read(kv_dtype: str) -> dict[tuple[str, str], list[Answer]]:
        with evicting_engine(model, eviction=OPTIONS, kv_cache_dtype=kv_dtype, **BASE) as llm:
            return {
                (kind, label): run(llm, group.asks, logits=True)
                for kind, groups in KINDS.items()
                for label, group in groups.items()
            }

    return read


def without_tails(monkeypatch) -> None:
    monkeypatch.setattr(Tails, "detach", lambda tails, request, account, untold: None)


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SERVERS | EIGHT_BITS)
def test_hits_say_what_misses_say(name: str, kind: str, model, read, monkeypatch) -> None:
    """First, then all once more, so that all hit, then some after a reset; conversations without tails."""
    if kind == "turns":
        without_tails(monkeypatch)
    groups, is_exact = chosen(name, kind), kind == "uncompressed"
    settings = (SERVERS | EIGHT_BITS)[name]
    kv_dtype = settings.get("kv_cache_dtype", "auto")
    missed, tolerance = read(kv_dtype), ROUNDED if kv_dtype == INT8 else CLOSE
    how = {"logits": name == "whole" or kind != "turns", "recorded": is_exact}
    with evicting_engine(model, eviction=OPTIONS, **{**CACHING, **settings}) as llm:

        def say(label: str, is_led: bool = False) -> int:
            """Ask a group; the tokens that it finds."""
            asks, before, expected = groups[label].asks, metric(llm, "prefix_cache_hits"), missed[kind, label]
            batches = [[ask] for ask in asks] if is_led else [asks]
            answers = [answer for batch in batches for answer in run(llm, batch, **how)]
            assert_same(expected, answers, kept=is_exact and kv_dtype != INT8, **tolerance)
            return metric(llm, "prefix_cache_hits") - before

        for label, group in groups.items():
            assert (say(label, group.is_led), say(label)) == (group.first, group.again), label
        # Each prompt counts once, however often it had to wait.
        asked = sum(ask.length for group in groups.values() for ask in group.asks)
        assert metric(llm, "prefix_cache_queries") == 2 * asked
        if kind == "compressed":
            assert metric(llm, "kv_eviction_evictions") == len(groups)
            assert metric(llm, "kv_eviction_cached_entries") == len(groups)
        assert llm.reset_prefix_cache()
        run(llm, [Ask(20, max_tokens=1)], recorded=False)
        assert metric(llm, "kv_eviction_cached_pages") == 0
        assert metric(llm, "kv_eviction_cached_uncompressed_pages") == 0
        for label in [*groups][:3] + [*groups][-3:]:
            say(label)
        assert num_preemptions(llm) == 0


@pytest.mark.engine
def test_whoever_asks_for_logprobs_of_the_prompt_reads_it_all(model) -> None:
    (ask,) = questions("ada-snapkv", 0, [220], prefix_len=200)
    fields = ask.sampling(logits=False).extra_args
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, extra_args=fields)
    with evicting_engine(model, **CACHING) as llm:
        run(llm, [ask])
        (output,) = llm.generate([ask.request], sampling, use_tqdm=False)
        assert output.num_cached_tokens == 0 and len(output.prompt_logprobs) == ask.length


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
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args=fields or None)
    prompt: dict[str, Any] = Ask(700).request
    with evicting_engine(model, **{**CACHING, "max_num_batched_tokens": 128}) as llm:
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
    said, prompt = [], Ask(300).prompt
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args=fields or None)
    for turn in range(turns):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        said.append((answer, output.num_cached_tokens))
        prompt = prompt + answer + Ask(90, seed=turn).prompt
    return said


@pytest.mark.engine
def test_a_chat_of_full_is_a_chat_of_vllm(model) -> None:
    """Tokens, and the blocks that each turn finds, answers of earlier ones included."""
    with engine(model, **CACHING) as llm:
        expected = chat(llm, 5)
    with evicting_engine(model, **CACHING) as llm:
        assert chat(llm, 5, kv_eviction="full") == expected
        # Its blocks are there for every policy, until an evicted answer is another one.
        evicted = chat(llm, 2, kv_eviction="ada-snapkv", kv_budget=0.3)
        assert [found for _, found in evicted] == [256, 256]
    assert expected[-1][1] > 512


@pytest.mark.engine
@pytest.mark.parametrize("lookahead", [0, 4])
def test_samples_of_one_prompt_read_it_once(model, lookahead: int) -> None:
    options = {"policy": "ada-snapkv", "budget": 0.3, "lookahead": lookahead}
    sampling = SamplingParams(n=4, seed=7, temperature=1, max_tokens=12, ignore_eos=True)
    said = {}
    for caching in (False, True):
        with evicting_engine(model, eviction=options, **BASE, enable_prefix_caching=caching) as llm:
            (output,) = llm.generate([Ask(600, seed=1).request], sampling, use_tqdm=False)
            said[caching] = [list(sample.token_ids) for sample in output.outputs]
            assert metric(llm, "prefix_cache_hits") == 3 * 512 * caching
            assert metric(llm, "kv_eviction_evictions") == 4
    assert said[True] == said[False] and len({tuple(sample) for sample in said[True]}) > 1


def test_there_is_a_request_slot_for_each_cached_prefix() -> None:
    assert RankCapacity(1000, 0, 4, 8, 4, 8).most_prefixes == 31
    assert RankCapacity(1_000_000, 0, 4, 8, 4, 8).most_prefixes == 4096
