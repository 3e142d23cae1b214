"""A prompt is evicted once its answer has begun: the first tokens are exact, and choose, whatever is done beside."""

import itertools
from typing import Any

import pytest
import torch

from tests.engine.served.test_answer_from import scores
from tests.engine.served.test_decisions import check_kept
from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.masked import CLOSE, check_logits, expected_logits, layer_inputs
from tests.engine.support.running import (
    Ask,
    assert_same,
    engine,
    evicting_engine,
    metric,
    num_preemptions,
    plain_prompts,
    run,
    run_preempted,
)
from tests.policies import reference, reference_select
from tests.policies.reference_scores import SCORE, Scored, Tensors
from tests.policies.test_against_reference import check_same
from vllm_kvevict.policies import EvictionConfig, LayerInputs
from vllm_kvevict.schedules.registry import lookahead_policies

AHEAD, SHORT = 40, 8
"""More and fewer than the tokens of a window; the server's, and what some requests ask for."""
OPTIONS = {"policy": "ada-snapkv", "budget": 0.2, "lookahead": AHEAD, "check": True}
SMALL: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 512, "max_num_batched_tokens": 4096}
BUDGETS = (0.2, 0.1, 48.0, 0.5, 0.35)
EVICTED = [
    Ask(130 + seed, policy, budget, max_tokens=ahead + 16, seed=seed, lookahead=ahead)
    for ahead, first in ((AHEAD, 0), (SHORT, 2))
    for seed, (policy, budget) in enumerate(
        zip(lookahead_policies(), itertools.islice(itertools.cycle(BUDGETS), first, None), strict=False),
        first,
    )
]
EDGES = [
    Ask(121, "snapkv", 0.2, max_tokens=AHEAD + 2),
    Ask(34, "ada-snapkv", 0.5, max_tokens=SHORT + 4, lookahead=SHORT),
    Ask(9, "knorm", 0.5, max_tokens=SHORT + 4, lookahead=SHORT),
    Ask(70, "ada-pyramid", 0.3, max_tokens=12, lookahead=1),
]
WHOLE = [Ask(120, "ada-snapkv", 0.2, max_tokens=AHEAD + 1), Ask(50, "full", max_tokens=60)]
"""They end before they are evicted."""
AT_ONCE = [
    Ask(122, "ada-snapkv", 0.3, lookahead=0),
    Ask(140, "ada-snapkv", 0.3, prefix_len=100),
    Ask(130, "h2o", 0.3),
]
"""Evicted once they are read."""
ASKS = [*EVICTED, *EDGES, *WHOLE, *AT_ONCE]
LATER = range(len(EVICTED) + len(EDGES))
"""Those that are evicted with a lookahead."""


def ahead_of(ask: Ask) -> int:
    return AHEAD if ask.lookahead is None else ask.lookahead


@pytest.fixture(scope="module")
def expected(model):
    """All at once, in whole steps."""
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        answers, prompts = run(llm, ASKS, logits=True), plain_prompts(llm)
    return answers, prompts


@pytest.mark.engine
def test_first_tokens_are_exact_and_later_ones_see_what_is_kept(model, expected) -> None:
    with engine(model, **SMALL) as llm:
        stock = run(llm, ASKS, recorded=False)
    changed = 0
    for index, (ask, answer, plain) in enumerate(zip(ASKS, expected[0], stock, strict=True)):
        if index in LATER:
            exact, at = ahead_of(ask) + 1, [ask.length + ahead_of(ask)]
            rows = [row for heads in answer.kept[0].values() for row in heads]
            assert sum(map(len, rows)) == len(rows) * (ask.config().budget_for(ask.length) + ahead_of(ask))
            assert answer.tokens[:exact] == plain.tokens[:exact], ask
            changed += answer.tokens != plain.tokens
            check_logits(model, ask, answer, at)
        else:
            assert bool(answer.kept) == (ask in AT_ONCE)
            assert ask in AT_ONCE or answer.tokens == plain.tokens
            check_logits(model, ask, answer)
    assert changed > len(LATER) // 2
    # The control: logits of the plain model that loses the same a token later.
    late = expected_logits(model, ASKS[0], expected[0][0], [ASKS[0].length + AHEAD + 1])
    assert not torch.allclose(expected[0][0].logits, late, **CLOSE)


@pytest.mark.engine
def test_the_queries_of_first_tokens_choose(model, expected) -> None:
    """As the slow reference does, of which these tokens are the prompt's last: they stay, and B is of the prompt."""
    answers, prompts = expected
    for index in LATER:
        ask, answer = ASKS[index], answers[index]
        n, ahead, config = ask.length, ahead_of(ask), ask.config()
        read = layer_inputs(model, (ask.prompt + answer.tokens)[: n + ahead], prompts)
        if ask.policy == "dropkv":  # whose reference would take minutes
            check_kept(config.for_lookahead(n, ahead), read, answer)
            continue
        b = reference.budget(n, config.budget, config.keep_ratio)
        window = max(reference.always_kept(ask.policy, b, config.params)[0], ahead)
        # The prompt alone is repeated, as soon as it is read.
        repeated = layer_inputs(model, ask.prompt, prompts) if ask.policy == "kvzip" else read
        layers = [
            scored(config, x, y.repeated, window, b + ahead - window)
            for x, y in zip(read, repeated, strict=True)
        ]
        params, heads = {**config.params, "window": window}, read[0].num_kv_heads
        wanted = reference_select.select(ask.policy, layers, n + ahead, b + ahead, params, heads)
        check_same([*answer.kept[0].values()], wanted, layers, config)


def scored(config: EvictionConfig, x: LayerInputs, repeated: torch.Tensor, window: int, b: int) -> Scored:
    """A layer by the slow reference, in float64."""
    score, given = SCORE[config.policy], (x.keys, x.q_window, x.values, x.w_o, repeated)
    k, q, v, w_o, paid = (tensor.double().numpy() for tensor in given)
    tensors = Tensors(k, q, v, w_o=w_o, repeated=paid, scale=x.scale)
    return Scored(None) if score is None else score(tensors, window, b, config.params)


SERVERS: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "PP 2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 128},
    "steps of 33": {"max_num_batched_tokens": 33, "max_num_seqs": 8},
    "steps of 32": {"max_num_batched_tokens": 32, "max_num_seqs": 6},
    "steps of 31": {"max_num_batched_tokens": 31, "max_num_seqs": 7},
    "drafts": {"speculative_config": NGRAM},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_servers(model, expected, name: str) -> None:
    with evicting_engine(model, eviction=OPTIONS, **{**SMALL, **SERVERS[name]}) as llm:
        answers = run(llm, ASKS)
        assert metric(llm, "kv_eviction_evictions") == len(LATER) + len(AT_ONCE)
        if name == "drafts":
            accepted = metric(llm, "spec_decode_num_accepted_tokens")
            assert accepted > 20 and metric(llm, "spec_decode_num_draft_tokens") - accepted > 20
    assert_same(expected[0], answers)


@pytest.mark.engine
def test_read_token_by_token(model, expected) -> None:
    indices = [index for index in LATER if ASKS[index].policy in ("ada-snapkv", "tova", "streaming-llm")]
    steps = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    with evicting_engine(model, eviction=OPTIONS, **{**SMALL, **steps}) as llm:
        answers = run(llm, [ASKS[index] for index in indices])
    assert_same([expected[0][index] for index in indices], answers)


@pytest.mark.engine
@pytest.mark.parametrize("caches", [False, True], ids=["alone", "caching"])
def test_preempted_around_the_eviction(model, expected, caches: bool) -> None:
    """Thrown out before, at and behind it, and read again in pieces, from cached tokens on if there are any."""
    settings = {**SMALL, "max_num_batched_tokens": 600, "enable_prefix_caching": caches, "block_size": 32}
    asks, known = EVICTED, expected[0][: len(EVICTED)]
    with evicting_engine(model, eviction=OPTIONS, **settings) as llm:
        for place in (SHORT + 6, AHEAD - 1, AHEAD, AHEAD + 1, AHEAD + 8):
            before, found = num_preemptions(llm), metric(llm, "prefix_cache_hits")
            answers = run_preempted(llm, asks, place, place + 7, resets=not caches, recorded=True)
            assert num_preemptions(llm) - before >= len(asks) // 2
            assert (metric(llm, "prefix_cache_hits") > found) == caches
            assert {len(answer.kept) for answer in answers} > {1}
            for ask, one, other in zip(asks, known, answers, strict=True):
                assert one.tokens == other.tokens, ask
                assert all(kept == one.kept[0] for kept in other.kept), ask


@pytest.mark.engine
@pytest.mark.parametrize("room", [SMALL["max_num_batched_tokens"], 48])
def test_hits(model, expected, room: int) -> None:
    """Prompts that were read before are found up to the window's queries among them, whatever was evicted since."""
    caching = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": room}
    with evicting_engine(model, eviction=OPTIONS, **{**SMALL, **caching, "max_num_seqs": 32}) as llm:
        assert_same(expected[0], run(llm, ASKS))
        before = metric(llm, "prefix_cache_hits")
        answers = run(llm, EVICTED, logits=True)
        found = metric(llm, "prefix_cache_hits") - before
    assert_same(expected[0][: len(EVICTED)], answers)
    assert found == sum(map(most_found, EVICTED))


def most_found(ask: Ask) -> int:
    """Tokens in whole blocks before those whose queries choose, of which the answer has some."""
    own = max(1, ask.config().window_for(ask.length) - ahead_of(ask))
    return (ask.length - own) // 32 * 32


@pytest.mark.engine
def test_an_answer_is_scored_as_it_was_written(model, expected) -> None:
    """`kv_answer_from` says where it began, so the eviction comes as many tokens later."""
    with evicting_engine(model, eviction=OPTIONS, **{**SMALL, "max_num_batched_tokens": 100}) as llm:
        for ask, answer in list(zip(EVICTED, expected[0], strict=False))[::5]:
            written, exact = answer.logits.log_softmax(-1), ahead_of(ask) + 1
            found = scores(llm, ask, answer.tokens, {"kv_answer_from": ask.length})
            torch.testing.assert_close(found, written, **CLOSE)
            # The control: a prompt that has it all is never evicted, and an answer that begins later is so later.
            for fields in ({}, {"kv_answer_from": ask.length + 1}):
                other = scores(llm, ask, answer.tokens, fields)
                torch.testing.assert_close(other[: exact - 1], written[: exact - 1], **CLOSE)
                assert not torch.allclose(other[exact:], written[exact:], **CLOSE), (ask, fields)


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "gemma3_text", "granitemoehybrid"])
def test_models_of_which_some_layers_are_evicted(models, architecture: str) -> None:
    """With windows, sinks, softcaps or states beside."""
    model, asks = models(architecture), [ask for ask in EVICTED if ask.policy in ("ada-snapkv", "keydiff")]
    settings = {**SMALL, "max_num_batched_tokens": 128}
    with engine(model, **settings, enable_prefix_caching=False) as llm:
        stock = run(llm, asks, recorded=False)
    with evicting_engine(model, eviction=OPTIONS, **settings) as llm:
        answers = run(llm, asks, logits=True)
    for ask, answer, plain in zip(asks, answers, stock, strict=True):
        ahead = ahead_of(ask)
        assert answer.tokens[: ahead + 1] == plain.tokens[: ahead + 1] and len(answer.kept) == 1
        check_logits(model, ask, answer, [ask.length + ahead])
