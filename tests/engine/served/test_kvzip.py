"""kvzip on real workers: scores of the model as Hugging Face defines it, whatever else the steps carry."""

import dataclasses

import pytest
import torch
from vllm import SamplingParams

from tests.engine.support.clients import words
from tests.engine.support.emulated import emulated_gpu
from tests.engine.support.masked import layer_inputs, masked_logits, repeated
from tests.engine.support.running import (
    Answer,
    Ask,
    bring_decisions,
    evicting_engine,
    num_preemptions,
    plain_prompts,
    run,
)
from vllm_kvevict.engine.frontend import requests
from vllm_kvevict.engine.frontend.chat import PREFIX_LEN
from vllm_kvevict.engine.worker import recording
from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide, score_layer
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

CHUNK, SINKS = 64, 4
ASK = Ask(300, "kvzip", 0.2, prefix_len=280)
SERVER = {"max_model_len": 1024, "max_num_batched_tokens": 100}
TOKENS = 1024
"""Of a tight pool."""
LAYOUTS = {
    "alone": {},
    "two tensor ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
EIGHT_WORKERS = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}


def options(**params):
    return {"policy": "kvzip", "kvzip_chunk": CHUNK, **params}


def model_inputs(
    model, prompt: list[int], prompts: RepeatPrompts, sees: str, sinks: int = SINKS, chunk: int = CHUNK
) -> list[LayerInputs]:
    """What kvzip may read of each layer."""
    behind = prompts.behind(prompt)
    most = repeated(model, prompt, lambda *part: behind.rows(prompt, *part), chunk, sees, sinks)
    tensors = layer_inputs(model, prompt, behind)
    return [dataclasses.replace(x, repeated=y) for x, y in zip(tensors, most, strict=True)]


def check(model, ask: Ask, answer, prompts: RepeatPrompts, sees: str = "all") -> None:
    """What was kept, and what the model says with it alone."""
    n = ask.prefix_len or ask.length
    check_kept(model, ask.prompt[:n], answer, prompts, sees, ask.budget)
    wanted = masked_logits(model, ask.prompt, answer.tokens, answer.kept[0], n)
    torch.testing.assert_close(answer.logits, wanted, atol=1e-4, rtol=1e-4)


def check_kept(model, prompt: list[int], answer, prompts: RepeatPrompts, sees: str, budget: float) -> None:
    """What was kept of a prompt, up to entries at the cut."""
    inputs = model_inputs(model, prompt, prompts, sees)
    check_choice(EvictionConfig("kvzip", keep_ratio=budget), inputs, answer)


def check_choice(config: EvictionConfig, inputs: list[LayerInputs], answer) -> None:
    """What was kept is what a configuration makes of a model's tensors, up to entries at the cut."""
    scores = [score_layer(config, x, layer, len(inputs)).scores for layer, x in enumerate(inputs)]
    expected = decide(config, inputs)
    swapped = []
    for layer, heads in enumerate(expected):
        for head, positions in enumerate(heads):
            other = set(answer.kept[0][layer][head]) ^ set(positions.tolist())
            swapped += scores[layer][head, list(other)].tolist()
    assert len(swapped) <= 4 and (not swapped or max(swapped) - min(swapped) <= 1e-5 * max(swapped))
    assert sum(len(head) for layer in answer.kept[0].values() for head in layer) == sum(
        len(head) for layer in expected for head in layer
    )


@pytest.mark.engine
@pytest.mark.parametrize("layout, sees", [*((layout, "all") for layout in LAYOUTS), ("alone", "chunk")])
def test_keeps_what_the_model_needs_to_repeat_the_prompt(models, layout, sees):
    """Five chunks, the last of them short; prompts of every kind beside each other."""
    model = models("llama", heads=8, kv_heads=4, layers=4)
    asks = [
        ASK,
        dataclasses.replace(ASK, prefix_len=None, seed=1),
        Ask(200, "kvzip", 0.3, prefix_len=64, seed=2),
    ]
    with evicting_engine(model, eviction=options(kvzip_sees=sees), **SERVER, **LAYOUTS[layout]) as llm:
        answers, prompts = run(llm, asks, logits=True), plain_prompts(llm)
        others = run(llm, [Ask(150, "take", 64.0), ASK, Ask(150, "snapkv", 0.2)])
    for ask, answer in zip(asks, answers, strict=True):
        check(model, ask, answer, prompts, sees)
    assert others[1].kept == answers[0].kept and others[1].tokens == answers[0].tokens
    with pytest.raises(AssertionError):
        check(model, dataclasses.replace(ASK, seed=3), answers[0], prompts, sees)


ASKED = {
    "max": {"window": 32, "kvzip_chunk": 512},
    "decay, chunk": {"window": 32, "kvzip_chunk": 128, "pooling": "decay", "kvzip_sees": "chunk"},
    "avg": {"window": 32, "kvzip_chunk": 512, "pooling": "avg", "kernel": 5, "sinks": 0},
}
"""Chunks so long that repeating pays a token no more than the window does."""


def check_asked(model, ask: Ask, answer, prompts: RepeatPrompts, params: dict) -> None:
    """What a prompt keeps whose window asks, too; and that its queries, and their pooling, matter."""
    n, sees = ask.prefix_len or ask.length, params.get("kvzip_sees", "all")
    sinks, chunk = params.get("sinks", SINKS), params["kvzip_chunk"]
    inputs = model_inputs(model, ask.prompt[:n], prompts, sees, sinks, chunk)
    check_choice(EvictionConfig("kvzip", keep_ratio=ask.budget, **params), inputs, answer)
    wanted = masked_logits(model, ask.prompt, answer.tokens, answer.kept[0], n)
    torch.testing.assert_close(answer.logits, wanted, atol=1e-4, rtol=1e-4)
    unpooled = {name: value for name, value in params.items() if name != "kernel"} | {"pooling": "none"}
    silent = [dataclasses.replace(x, q_window=0 * x.q_window) for x in inputs]
    for other, given in ((unpooled, inputs), (params, silent)):
        with pytest.raises(AssertionError):
            check_choice(EvictionConfig("kvzip", keep_ratio=ask.budget, **other), given, answer)


@pytest.mark.engine
@pytest.mark.parametrize(
    "layout, name", [*zip(LAYOUTS, ASKED, strict=True), *(("alone", name) for name in list(ASKED)[1:])]
)
def test_keeps_what_a_window_asks_for_as_well(models, layout, name):
    """Windows that one step reads, and two; prompts with their question, and prefixes without one."""
    params = ASKED[name]
    model = models("llama", heads=8, kv_heads=4, layers=4)
    asks = [
        Ask(300, "kvzip", 0.3, seed=1),
        Ask(206, "kvzip", 0.3, seed=2),
        Ask(240, "kvzip", 0.3, prefix_len=205, seed=3),
    ]
    with evicting_engine(model, eviction=options(**params), **SERVER, **LAYOUTS[layout]) as llm:
        answers, prompts = run(llm, asks, logits=True), plain_prompts(llm)
        (alone,) = run(llm, asks[:1])
    assert alone.kept == answers[0].kept
    for ask, answer in zip(asks, answers, strict=True):
        check_asked(model, ask, answer, prompts, params)


@pytest.mark.engine
def test_a_window_on_ranks_that_share_a_kv_head(models):
    """An average of neighbours is taken of the maximum over all query heads of the group, not over a rank's."""
    model = models("llama", heads=4, kv_heads=1)
    with evicting_engine(model, eviction=options(**ASKED["avg"]), **SERVER, tensor_parallel_size=2) as llm:
        (answer,), prompts = run(llm, [Ask(300, "kvzip", 0.3)], logits=True), plain_prompts(llm)
    check_asked(model, Ask(300, "kvzip", 0.3), answer, prompts, ASKED["avg"])


@pytest.mark.engine
def test_a_window_behind_cached_tokens(models):
    """Queries are not cached: the window's are computed again. A cached prefix keeps what its own window asked for."""
    model = models("llama", heads=8, kv_heads=4, layers=4)
    asks = [Ask(300, "kvzip", 0.3), Ask(310, "kvzip", 0.3, prefix_len=280, seed=1)]
    server = {"eviction": options(**ASKED["max"]), **SERVER}
    with evicting_engine(model, **server) as llm:
        expected, prompts = run(llm, asks, logits=True), plain_prompts(llm)
    with evicting_engine(model, **server, enable_prefix_caching=True) as llm:
        rounds = [run(llm, asks, logits=True) for _ in range(2)]
        assert num_hits(llm) > 280 + 200
    for answers in rounds:
        for answer, wanted in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer.logits, wanted.logits, atol=1e-4, rtol=1e-4)
        check_asked(model, asks[0], answers[0], prompts, ASKED["max"])
    assert rounds[0][1].kept and not rounds[1][1].kept


def num_hits(llm) -> int:
    """Tokens that requests began with, since the engine started."""
    return next(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


@pytest.mark.engine
def test_a_window_on_a_gpu(models):
    """Its kernel gives the maximum over the window's rows."""
    model, ask, params = (
        models("llama", layers=2),
        Ask(100, "kvzip", 0.5, max_tokens=2),
        {"window": 16, "kvzip_chunk": 512},
    )
    with emulated_gpu(), evicting_engine(model, eviction=options(**params)) as llm:
        (answer,), prompts = run(llm, [ask], logits=True), plain_prompts(llm)
    check_asked(model, ask, answer, prompts, params)


@pytest.mark.engine
def test_two_stages_of_four_tensor_ranks_keep_the_same(models):
    model = models("llama", heads=8, kv_heads=4, layers=4)
    with evicting_engine(model, eviction=options(), **SERVER, **EIGHT_WORKERS) as llm:
        (answer,), prompts = run(llm, [ASK], logits=True), plain_prompts(llm)
    check(model, ASK, answer, prompts)


@pytest.mark.engine
def test_what_the_rows_are_and_see_matters(models):
    """Controls: rows that see only their chunk, or that begin otherwise, compute other queries."""
    model = models("llama", heads=8, kv_heads=4, layers=4)
    with evicting_engine(model, eviction=options(), **SERVER) as llm:
        (answer,), prompts = run(llm, [ASK], logits=True), plain_prompts(llm)
    check(model, ASK, answer, prompts)
    assert prompts.first and prompts.before
    for others in (
        (prompts, "chunk"),
        (dataclasses.replace(prompts, before=(9,) * len(prompts.before)), "all"),
    ):
        with pytest.raises(AssertionError):
            check(model, ASK, answer, *others)


@pytest.mark.engine
def test_a_chat_is_repeated_in_the_words_of_its_template(models, monkeypatch):
    model = models("llama", heads=8, kv_heads=4, layers=4)
    found, find = [], requests.repeat_prompts

    def noting(*args, **kwargs):
        found.append((find(*args, **kwargs), args[1][PREFIX_LEN]))
        return found[-1][0]

    monkeypatch.setattr(requests, "repeat_prompts", noting)
    chat = [{"role": "system", "content": words(200)}, {"role": "user", "content": words(5)}]
    with evicting_engine(model, eviction=options(scope="prefix"), **SERVER) as llm:
        params = SamplingParams(max_tokens=4, temperature=0)
        (output,) = llm.chat([chat], params, use_tqdm=False)
        answer, plain = Answer([], torch.empty(0)), plain_prompts(llm)
        bring_decisions(llm, [output.request_id], [answer])
    ((prompts, n),) = found
    check_kept(model, output.prompt_token_ids[:n], answer, prompts, "all", 0.2)
    with pytest.raises(AssertionError):
        check_kept(model, output.prompt_token_ids[:n], answer, plain, "all", 0.2)


@pytest.mark.engine
@pytest.mark.parametrize("window", [0, 32])
def test_two_questions_on_a_prefix_keep_the_same(models, window):
    model = models("llama", heads=8, kv_heads=4, layers=4)
    with evicting_engine(model, eviction=options(window=window), **SERVER) as llm:
        one = run(llm, [ASK])[0]
        prompts = [{"prompt_token_ids": ASK.prompt[:280] + tail} for tail in ([9, 10, 11], [300, 20])]
        llm.generate(prompts, [ASK.sampling(False)] * 2, use_tqdm=False)
        joined = recording.evictions(llm.collective_rpc(recording.take_decisions))
    kept = [
        {layer: [head.tolist() for head in heads] for layer, heads in eviction.kept.items()}
        for (eviction,) in joined.values()
    ]
    assert kept == [one.kept[0]] * 2


@pytest.mark.engine
@pytest.mark.parametrize(
    "settings, window", [({}, 0), ({"pipeline_parallel_size": 2}, 32)], ids=["alone", "two stages, a window"]
)
def test_in_a_tight_pool(models, settings, window):
    """Requests that are preempted repeat from the beginning and keep the same."""
    # 8 rows, 32 values of a key and of a value each: 2 KiB a token, of which a stage has its share.
    model, stages = models("llama", heads=4, kv_heads=2, layers=4), settings.get("pipeline_parallel_size", 1)
    asks = [Ask(300, "kvzip", 0.5, max_tokens=200, seed=seed) for seed in range(4)]
    common = {"eviction": options(decode_reserve=8, window=window), "max_model_len": 640, **settings}
    with evicting_engine(model, **common) as llm:
        calm = run(llm, asks)
    with evicting_engine(model, **common, kv_cache_memory_bytes=TOKENS * 2048 // stages) as llm:
        tight = run(llm, asks)
        assert num_preemptions(llm)
    for one, other in zip(calm, tight, strict=True):
        assert one.tokens == other.tokens and one.kept[0] == other.kept[-1]


@pytest.mark.engine
@pytest.mark.parametrize("window", [0, 32])
def test_aborted_at_any_step(models, window):
    model = models("llama", heads=8, kv_heads=4, layers=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={"kv_prefix_len": 280})
    with evicting_engine(model, eviction=options(window=window), **SERVER) as llm:
        (calm,) = run(llm, [ASK])
        for steps in range(1, 12):
            llm.llm_engine.add_request(f"leaves-{steps}", {"prompt_token_ids": ASK.prompt}, params)
            for _ in range(steps):
                llm.llm_engine.step()
            llm.llm_engine.abort_request([f"leaves-{steps}"])
        llm.collective_rpc(recording.take_decisions)
        (again,) = run(llm, [ASK])
        assert again.kept == calm.kept and again.tokens == calm.tokens
