"""Drafts change no answer: they are verified, and what was stored of rejected ones is dropped again."""

import random
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.support import suffix
from tests.engine.support.running import (
    VOCAB,
    Ask,
    assert_same,
    evicting_engine,
    metric,
    num_preemptions,
    run,
)
from tests.engine.support.servers import Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.sampling import expand_batch_to_tokens
from vllm_kvevict.policies import available

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 160, "max_model_len": 512}
ASKS = [
    Ask(300, "full", max_tokens=48),
    Ask(200, "ada-snapkv", 1.0, max_tokens=48),
    *[
        Ask(130 + 7 * seed, policy, budget, seed=seed, max_tokens=24)
        for seed, policy in enumerate(sorted(available()))
        for budget in (0.3, 0.6)
    ],
    Ask(250, "lava", 0.2, prefix_len=200, max_tokens=30),
    Ask(1, max_tokens=30),
    Ask(40, max_tokens=1),
    Ask(41, max_tokens=2),
    Ask(500, "snapkv", 0.1, max_tokens=12),
]


def drafts(llm) -> tuple[int, int]:
    """Draft tokens that were accepted and rejected."""
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
    return accepted, metric(llm, "spec_decode_num_draft_tokens") - accepted


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.fixture(scope="module")
def expected(model):
    with evicting_engine(model, **SMALL_STEPS) as llm:
        return run(llm, ASKS, logits=True)


@pytest.mark.engine
@pytest.mark.parametrize("method", [NGRAM, SUFFIX], ids=lambda method: method["method"])
def test_answers_are_those_without_drafts(model, expected, method, monkeypatch):
    suffix.install(monkeypatch)
    with evicting_engine(model, speculative_config=method, **SMALL_STEPS) as llm:
        assert_same(expected, run(llm, ASKS, logits=True), kept=False)
        accepted, rejected = drafts(llm)
    assert accepted > 100 and rejected > 100


@pytest.mark.engine
def test_they_are_not_if_rejected_drafts_stay(model, expected, monkeypatch):
    monkeypatch.setenv("VLLM_KVEVICT_CHECK", "0")
    monkeypatch.setattr(PagedKVCache, "truncate", lambda self, slots, dropped: None)
    asks = ASKS[:2]
    with (
        evicting_engine(model, speculative_config=NGRAM, **SMALL_STEPS) as llm,
        pytest.raises(AssertionError),
    ):
        assert_same(expected[:2], run(llm, asks, logits=True), kept=False)


@pytest.mark.engine
def test_requests_that_are_preempted(model):
    settings = {**SMALL_STEPS, "num_gpu_blocks_override": 7, "eviction": {"decode_reserve": 1}}
    asks = [
        Ask(250, policy, budget, seed=seed, max_tokens=90)
        for seed, (policy, budget) in enumerate([("ada-snapkv", 0.6), ("full", None), ("full", None)] * 3)
    ]
    with evicting_engine(model, **SMALL_STEPS) as llm:
        expected = run(llm, asks, logits=True)
    with evicting_engine(model, speculative_config=NGRAM, **settings) as llm:
        assert_same(expected, run(llm, asks, logits=True), kept=False)
        assert all(drafts(llm)) and num_preemptions(llm)


@pytest.mark.engine
def test_layers_with_windows(models):
    """They have few blocks, which drafts do not take from others."""
    settings = {"max_num_batched_tokens": 128, "max_model_len": 512, "max_num_seqs": 16}
    asks = [*ASKS[:2], Ask(180, "lava", 0.2, max_tokens=60), Ask(330, "knorm", 0.3, max_tokens=60)]
    model = models("gpt_oss")
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, asks, logits=True)
    for blocks in ({}, {"num_gpu_blocks_override": 16}):
        with evicting_engine(model, speculative_config=NGRAM, **settings, **blocks) as llm:
            assert_same(expected, run(llm, asks, logits=True), kept=False)
            assert all(drafts(llm))


KINDS = [
    {"n": 2, "temperature": 1, "top_k": 1},
    {"structured_outputs": StructuredOutputsParams(choice=["w6w7w6", "w8w9"])},
    {"structured_outputs": StructuredOutputsParams(regex="w6(w7|w8)+")},
    {"prompt_logprobs": 2},
    {"stop_token_ids": list(range(0, VOCAB, 3))},
    {"repetition_penalty": 1.3},
    {"min_tokens": 20, "stop_token_ids": list(range(VOCAB // 2))},
]
"""What requests may ask for beside."""


def answers_of_all_kinds(llm) -> list[list[list[int]]]:
    """To a prompt that is kept whole and to others that are evicted, asked in each way."""
    asks = [
        (ask, fields)
        for ask in (
            Ask(200, "full", max_tokens=40),
            Ask(250, "ada-snapkv", 0.3, max_tokens=40),
            Ask(230, "ada-snapkv", 0.3, max_tokens=40, seed=1),
        )
        for fields in KINDS
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": ask.prompt} for ask, _ in asks],
        [
            SamplingParams(
                **{"temperature": 0, **fields},
                max_tokens=40,
                ignore_eos=True,
                extra_args=ask.sampling(False).extra_args,
            )
            for ask, fields in asks
        ],
        use_tqdm=False,
    )
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.mark.engine
def test_requests_of_every_kind(model):
    with evicting_engine(model, **SMALL_STEPS) as llm:
        expected = answers_of_all_kinds(llm)
    with evicting_engine(model, speculative_config=NGRAM, **SMALL_STEPS) as llm:
        assert answers_of_all_kinds(llm) == expected
        assert all(drafts(llm))
    lengths = {len(answer) for answers in expected for answer in answers}
    assert len(lengths) > 3, "all are equally long: nothing stopped"


def test_each_draft_has_the_values_of_its_request():
    values, ends = torch.tensor([0.7, 0.0, 1.3, 2.0]), torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    expected = [0.7, 0.7, 1.0, 2.0, 2.0, 2.0]
    assert expand_batch_to_tokens(values, ends, 6, 0, 1).tolist() == torch.tensor(expected).tolist()
    top_k = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    found = expand_batch_to_tokens(top_k, ends, 6)
    assert found.tolist() == [5, 5, 6, 8, 8, 8] and found.dtype == torch.int32


CACHING: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 32}
NO_WINDOW = {"eviction": {"policy": "knorm", "budget": 0.4, "window": 0}}
ONE_LEFT = [
    Ask(129, "full", max_tokens=40),
    Ask(97, "knorm", 0.4, max_tokens=40),
    Ask(161, "lava", 0.3, prefix_len=160, max_tokens=40),
]
"""Requests of which one token is not found when they are asked again; vLLM would pad that token with placeholders."""


@pytest.mark.engine
def test_cached_prefixes_with_one_token_left(model):
    with evicting_engine(model, **NO_WINDOW, **SMALL_STEPS) as llm:
        expected = run(llm, ONE_LEFT, logits=True)
    with evicting_engine(model, speculative_config=NGRAM, **NO_WINDOW, **CACHING, **SMALL_STEPS) as llm:
        for _ in range(2):
            assert_same(expected, run(llm, ONE_LEFT, logits=True), kept=False)
        # The last one finds its prompt uncompressed, up to the window of its policy.
        assert metric(llm, "prefix_cache_hits") == 96 + 64 + 128
        assert all(drafts(llm))


# Memory, with simulated workers.


def small_server(drafts: int, pages: int, reserve: int = 1) -> Simulation:
    """A server that keeps all of requests of up to 352 tokens, with 4 rows a request."""
    options = {"policy": "full", "check": True, "decode_reserve": reserve, "min_prompt": 0}
    return Simulation(Setup([(2, 2)], [4 * pages], 352, drafts=drafts, options=options))


def total_preemptions(drafts: int, room: list[int] | None = None) -> int:
    """Preemptions of random requests on servers with little memory."""
    preemptions = 0
    for seed in range(60):
        choose = random.Random(seed)
        server = small_server(drafts, pages=choose.randrange(11, 40))
        if room is not None:
            server.ledger.books.room_for_drafts = lambda accounts: room
        for index in range(12):
            server.add(make_request(f"r{index}", choose.randrange(20, 280), choose.randrange(1, 60)))
        server.run(4000)
        assert server.accepted == drafts == 0 or server.accepted
        preemptions += sum(server.preemptions.values())
    return preemptions


def test_drafts_take_no_pages_that_others_need():
    without = total_preemptions(0)
    assert without and total_preemptions(8) <= without < total_preemptions(8, room=[1 << 30])


def test_drafts_end_where_the_answer_does():
    """A request that fills the pool exactly ends with its last token, not for lack of memory."""
    for answer in (7, 8, 40):
        server = small_server(drafts=5, pages=11)
        server.add(make_request("r", 352 - answer, answer))
        server.run(200)
        assert server.outputs == {"r": answer} and server.preemptions == {"r": 0}
