"""Answers that are evicted beside shared KV, adapters, and on the pages of a GPU."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.served.test_answers_anywhere import RULES, SMALL
from tests.engine.support.answers import Rules
from tests.engine.support.conversations import questions
from tests.engine.support.emulated import emulated_gpu
from tests.engine.support.masked import CLOSE, check_logits, masked_logits
from tests.engine.support.running import (
    Ask,
    assert_same,
    evicting_engine,
    metric,
    num_preemptions,
    run,
    run_preempted,
)
from vllm_kvevict.engine.worker.attention import RaggedImpl
from vllm_kvevict.engine.worker.runtime import Runtime, get_runtime

OPTIONS = RULES.options("ada-snapkv")
CACHING = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.mark.engine
@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}], ids=["alone", "TP 2"])
def test_two_answers_behind_one_compressed_prefix(model, sizes: dict[str, int]) -> None:
    """What a borrower decodes is its own, and the prefix stays as it was for the next one."""
    asks = questions("ada-snapkv", 0, (120, 131, 101, 120), 100, prefix_len=100, max_tokens=60)
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        expected = [run(llm, [ask], logits=True)[0] for ask in asks]
    RULES.check(model, asks, expected)
    with evicting_engine(model, eviction=OPTIONS, **SMALL, **CACHING, **sizes) as llm:
        for _ in range(2):
            assert_same(expected, run(llm, asks, logits=True), kept=False)
        assert metric(llm, "kv_eviction_cached_entries") == 1
        assert metric(llm, "prefix_cache_hits") == 7 * 100
        assert num_preemptions(llm) == 0


@pytest.mark.engine
def test_answers_behind_uncompressed_prefixes(model) -> None:
    """Who asks again finds the prompt, and of an evicted answer nothing; replays find no more than that either."""
    kept, evicted = Ask(256, max_tokens=140, decode_budget=0), Ask(256, max_tokens=140)
    short = dataclasses.replace(evicted, max_tokens=RULES.budget + RULES.interval)
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        expected = [run(llm, [ask], logits=True)[0] for ask in (kept, evicted)]
    RULES.check(model, [evicted], expected[1:])
    assert expected[0].tokens != expected[1].tokens

    def found(llm, tokens: list[int]) -> int:
        """Tokens that a request which is kept whole finds."""
        before = metric(llm, "prefix_cache_hits")
        llm.generate(
            [{"prompt_token_ids": tokens}],
            Ask(1, max_tokens=1, decode_budget=0).sampling(False),
            use_tqdm=False,
        )
        return metric(llm, "prefix_cache_hits") - before

    with evicting_engine(model, eviction=OPTIONS, **SMALL, **CACHING) as llm:
        (answer,) = run(llm, [evicted], logits=True)
        assert answer.tokens == expected[1].tokens
        # 384 tokens are whole blocks: an answer that is kept leaves them, and one that is evicted its prompt's two.
        assert found(llm, evicted.prompt + answer.tokens) == 256
        (again,) = run(llm, [evicted], logits=True)
        torch.testing.assert_close(again.logits, expected[1].logits, **CLOSE)
        assert llm.reset_prefix_cache()
        (answer,) = run(llm, [kept])
        assert found(llm, kept.prompt + answer.tokens) == 384
        # Of an answer that was never evicted others find all that is in whole blocks, and begin with the prompt alone.
        before = metric(llm, "prefix_cache_hits")
        (replayed,) = run_preempted(llm, [evicted], 99, resets=False, logits=True)
        assert num_preemptions(llm) == 1 and metric(llm, "prefix_cache_hits") > before
        assert replayed.tokens == expected[1].tokens
        torch.testing.assert_close(replayed.logits, expected[1].logits, **CLOSE)
        # What a replay reads when nothing is cached any more is left once it is read, evictions later.
        (replayed,) = run_preempted(llm, [evicted], 99, logits=True)
        torch.testing.assert_close(replayed.logits, expected[1].logits, **CLOSE)
        assert found(llm, evicted.prompt + replayed.tokens) == 256
        (again,) = run(llm, [evicted], logits=True)
        torch.testing.assert_close(again.logits, expected[1].logits, **CLOSE)
        (answer,) = run(llm, [short])
        assert answer.tokens == expected[1].tokens[: short.max_tokens] and not answer.kept


GPU = Rules(12, 6, 4)
"""Few tokens, since kernels are interpreted."""
LATER = {"policy": "ada-snapkv", "budget": 0.5, "lookahead": 6, "check": True}


@pytest.mark.engine
@pytest.mark.parametrize("options", [GPU.options("ada-snapkv"), LATER], ids=["answers", "lookahead"])
def test_on_the_pages_of_a_gpu_as_a_graph_replays_them(models, monkeypatch, options) -> None:
    """What a graph captured for a number of requests holds good for any step with as many decodes, though prompts of
    several lengths come and go; each writes its queries through the places that it looks up."""
    model = models("llama", layers=2)
    asks = [Ask(40, max_tokens=30), Ask(45, "ada-snapkv", 0.8, max_tokens=28, seed=1), Ask(33, max_tokens=19)]
    if options is LATER:
        policies = ("snapkv", "ada-snapkv", "criticalkv")
        asks = [dataclasses.replace(x, policy=y, budget=0.5) for x, y in zip(asks, policies, strict=True)]
    captured: dict[int, Any] = {}
    replayed, places, reads = [], set(), []
    build, forward, asked = Runtime.build, RaggedImpl.forward, Runtime.reads_prompts

    def building(runtime, common):
        batch = common.num_reqs
        if batch not in captured:
            captured[batch] = runtime.build_dummy(
                SimpleNamespace(num_reqs=batch, num_actual_tokens=batch, max_query_len=1)
            )
        reads.append((runtime._step.scheduled, asked(runtime)))
        return build(runtime, common)

    def replaying(self, layer, query, key, value, kv_cache, state, output, *rest, **options):
        batch = state.batch
        if batch.decodes and batch.entry_slots is None and not batch.by_layer and not state.evictions:
            replayed.append(batch.num_tokens)
            state = captured[batch.num_tokens]
            assert state.ring is not None and state.ring.rows is None
            rank = get_runtime().rank
            of_graphs = (
                rank.cache.tables.row_starts,
                rank.cache.tables.kv_len,
                rank.evictor.ring.slots_of_graphs,
            )
            places.add(tuple(x.data_ptr() for x in of_graphs))
        return forward(self, layer, query, key, value, kv_cache, state, output, *rest, **options)

    monkeypatch.setattr(Runtime, "build", building)
    monkeypatch.setattr(RaggedImpl, "forward", replaying)
    # A prompt of 33 tokens is read with a last chunk of one.
    settings = {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 32}
    with emulated_gpu(), evicting_engine(model, eviction=options, **settings) as llm:
        answers = run(llm, asks, logits=True)
    monkeypatch.undo()
    if options is LATER:
        for ask, answer in zip(asks, answers, strict=True):
            check_logits(model, ask, answer, [ask.length + LATER["lookahead"]])
    else:
        GPU.check(model, asks, answers)
    assert {1, 2} <= set(replayed) and len(places) == 1
    # No step that decodes alone leaves the graphs for the position of an answer.
    decodes = [was for scheduled, was in reads if set(scheduled.values()) == {1}]
    assert len(decodes) > 40 and not any(decodes)
    with evicting_engine(model, eviction=options, **settings) as llm:
        assert_same(run(llm, asks), answers)
    blind = masked_logits(model, asks[0].prompt, answers[0].tokens)
    assert not torch.allclose(answers[0].logits, blind, **CLOSE)
