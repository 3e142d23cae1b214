"""Models of which only some layers are evicted; those with a window, or a state, stay with vLLM."""

import dataclasses

import pytest

from benchmarks.harness.models import WINDOW, WINDOWED
from tests.engine.served.test_masked_model import check
from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Ask, engine, evicting_engine, num_preemptions, run
from vllm_kvevict.engine.groups import layer_groups
from vllm_kvevict.engine.memory import bounds_of

SAMPLE = ("gpt_oss", "gemma2", "granitemoehybrid", "nemotron_h")
"""A model of each kind: windows with sinks, windows with softcap, states, and layers that remember nothing."""
CHUNKED = {"max_num_batched_tokens": 256}
LENGTHS = (300, 31, 700, 65, 520)
TOKENS = 40


def asks(policy="full", budget=None, tokens=TOKENS):
    return [Ask(length, policy, budget, max_tokens=tokens) for length in LENGTHS]


def tokens_of(answers):
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def stock(models):
    """Greedy tokens of vLLM without the flag, by model."""
    known = {}

    def get(architecture):
        if architecture not in known:
            with engine(models(architecture), enable_prefix_caching=False) as llm:
                known[architecture] = tokens_of(run(llm, asks(), recorded=False))
        return known[architecture]

    return get


@pytest.mark.engine
@pytest.mark.parametrize("architecture", SAMPLE)
def test_nothing_evicted_equals_stock(models, stock, architecture):
    expected = stock(architecture)
    assert len({token for tokens in expected for token in tokens}) > 4, (
        "the model says the same of everything"
    )
    with evicting_engine(models(architecture), **CHUNKED) as llm:
        assert tokens_of(run(llm, asks())) == expected
        assert tokens_of(run(llm, asks("ada-snapkv", 1.0))) == expected
        assert tokens_of(run(llm, asks("ada-snapkv", 0.2))) != expected


@pytest.mark.engine
@pytest.mark.parametrize("architecture", SAMPLE)
def test_logits_equal_those_of_a_masked_model(models, architecture):
    model = models(architecture)
    evicted = [Ask(300, "ada-snapkv", 0.3), Ask(400, "pyramidkv", 0.3), Ask(120, "full")]
    with evicting_engine(model) as llm:
        answers = run(llm, evicted, logits=True)
    for ask, answer in zip(evicted, answers, strict=True):
        check(model, ask, answer, atol=1e-4, rtol=1e-4)
    ask, answer = evicted[0], answers[0]
    everything = {layer: [range(ask.length)] * len(heads) for layer, heads in answer.kept[0].items()}
    wrong = [masked_logits(model, ask.prompt, answer.tokens, everything, ask.length)]
    if architecture in WINDOWED:
        wider = {"window": 2 * WINDOW}
        wrong.append(masked_logits(model, ask.prompt, answer.tokens, answer.kept[0], ask.length, **wider))
    assert all((answer.logits - logits).abs().max() > 1e-2 for logits in wrong)


def most_running(llm):
    """Lets the scheduler count; the most requests that were in one step so far is the only element."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    plain, most = scheduler.schedule, [0]

    def counting(*args, **kwargs):
        output = plain(*args, **kwargs)
        most[0] = max(most[0], len(output.num_scheduled_tokens))
        return output

    scheduler.schedule = counting
    return most


LONG_ANSWERS = [Ask(40 + 20 * i, "full", max_tokens=350, seed=i) for i in range(5)]
"""They outgrow the pages."""
MANY = [Ask(20, "full", max_tokens=120 + i, seed=i) for i in range(16)]
"""They outgrow the windows: each of them has as many blocks there as pages."""
EVICTED = [Ask(400 - 30 * i, "ada-snapkv", 0.3, max_tokens=64, seed=i) for i in range(8)]


@pytest.mark.engine
def test_memory_that_both_kinds_of_layers_are_short_of(models):
    """Blocks become pages and windows again many times over, and whoever lacks some starts anew."""
    model, loads = models("gemma3_text"), (LONG_ANSWERS, MANY, EVICTED)
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 18}
    with engine(model, enable_prefix_caching=False) as llm:
        expected = [tokens_of(run(llm, load, recorded=False)) for load in loads[:2]]
    with evicting_engine(model) as llm:
        expected.append(tokens_of(run(llm, EVICTED)))
        assert num_preemptions(llm) == 0
    with evicting_engine(model, eviction={"decode_reserve": 16}, **settings) as llm:
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        preempted, as_pages = [0], []
        for load, tokens in zip(loads, expected, strict=True):
            assert tokens_of(run(llm, load)) == tokens
            preempted.append(num_preemptions(llm))
            as_pages.append(len(ledger.blocks.as_pages))
        run(llm, [Ask(20, max_tokens=1)])  # the workers hear of the last that finished
        assert ledger.books.used == [0] and ledger.blocks.beyond_withheld(ledger.blocks.of_others) == 0
        assert ledger.block_pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == 17
    assert 0 < preempted[1] < preempted[2], preempted
    assert len(set(as_pages)) > 1, as_pages


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture, memory, times",
    [("gemma3_text", 1 << 24, 1.8), ("granitemoehybrid", 1 << 22, 3.0)],
)
def test_more_requests_at_once(models, architecture, memory, times):
    prompts = 32
    settings = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,  # all prompts are read while the first still answer
        "max_num_seqs": prompts,
        "kv_cache_memory_bytes": memory,
    }
    with engine(models(architecture), enable_prefix_caching=False, **settings) as llm:
        at_once = most_running(llm)
        run(llm, [Ask(900, seed=i, max_tokens=80) for i in range(prompts)], recorded=False)
    with evicting_engine(models(architecture), **settings) as llm:
        ours = most_running(llm)
        run(llm, [Ask(900, "ada-snapkv", 0.2, seed=i, max_tokens=80) for i in range(prompts)])
    assert at_once[0] < prompts
    assert ours[0] >= times * at_once[0], (ours, at_once)


@pytest.mark.engine
@pytest.mark.parametrize("architecture, blocks", [("gpt_oss", 26), ("gemma3_text", 31), ("falcon_h1", 20)])
def test_front_end_and_scheduler_know_of_the_same_memory(models, architecture, blocks):
    """The front-end foresees how vLLM groups the layers; it may think of a block less in each group."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "num_gpu_blocks_override": blocks}
    with evicting_engine(models(architecture), **settings) as llm:
        (foreseen,) = bounds_of(llm.llm_engine.vllm_config).ranks
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        (known,) = ledger.books.ranks
        groups = layer_groups(llm.llm_engine.vllm_config)
        pages_per_block = known.pages // ledger.blocks.most
    assert dataclasses.replace(foreseen, pages=known.pages) == known
    assert known.pages - len(groups.others) * pages_per_block <= foreseen.pages <= known.pages


@pytest.mark.engine
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "falcon_h1"])
def test_workers(models, architecture, size):
    model = models(architecture)
    evicted = [
        Ask(length, policy, 0.3, seed=i)
        for i, (length, policy) in enumerate([(300, "ada-snapkv"), (200, "lava"), (410, "pyramidkv")])
    ]
    settings = {"max_num_batched_tokens": 256, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 24}
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, evicted)
    with evicting_engine(model, **settings, **{size: 2}) as llm:
        answers = run(llm, evicted)
    assert tokens_of(answers) == tokens_of(expected)
    assert [answer.kept for answer in answers] == [answer.kept for answer in expected]
