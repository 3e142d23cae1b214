"""What requests hold beside their KV: set aside at start-up, shared out in turn, and refused where it was not."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

import vllm_kvevict.engine  # noqa: F401
from tests.engine.support.masked import evicted_layers
from tests.engine.support.running import Ask, engine, evicting_engine, run
from tests.engine.support.servers import DIMS, HEAD_SIZE, PAGE, Setup, flights, make_request
from tests.engine.support.serving import command
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.engine.scheduler.reserve import Reserve
from vllm_kvevict.engine.worker.reserve import allocate
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.policies import available
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import needs_reserve

LONGEST = 2048
RESERVING = ["h2o", "kvzip", "compactor", "expected-attention"]
TILE = 128 * HEAD_SIZE
"""Numbers for each query head of a tile's queries."""


def setup(policies: str = "unreserved", **settings: Any) -> Setup:
    options = {"policy": "h2o", "budget": 0.2, "min_prompt": 0, "policies": policies}
    pages = 4 * 10 * LONGEST // PAGE
    return Setup([(2, 2)], [pages], LONGEST, options=options, **settings)


def test_the_registry_says_who_needs_it():
    assert [policy for policy in available() if needs_reserve(policy)] == RESERVING


# The scheduler. Workers of the simulation check in every step that no two requests share a place.


def test_what_is_held_of_a_prompt() -> None:
    for policy, expected in (
        ("h2o", LONGEST),
        ("kvzip", LONGEST),
        ("compactor", LONGEST + TILE),
        ("expected-attention", (HEAD_SIZE + 1) ** 2 + TILE),
        ("snapkv", 0),
    ):
        options = Options.parse({"policy": policy, "budget": 0.2})
        plan = plan_for(options, LONGEST)
        assert plan.reserved(DIMS) == options.reserve_size(LONGEST, DIMS) == expected
        assert plan_for(options, 100).reserved(DIMS) == 0
        in_one_step = plan_for(options, LONGEST).reserved(DIMS, in_one_step=True)
        assert in_one_step == (expected if policy == "kvzip" else 0)
    kvzip = Options.parse({"policy": "kvzip", "budget": 0.2})
    assert kvzip.reserve_size(1001, HeadDims(HEAD_SIZE, 4)) == 251


def test_prompts_of_few_sums_are_read_side_by_side() -> None:
    """The place of one longest prompt of compactor is room for several of expected-attention."""
    longest = 8 * LONGEST
    in_parts = setup(max_num_batched_tokens=longest, long_prefill=LONGEST // 2, policies="all")
    simulation = Simulation(replace(in_parts, max_model_len=longest))
    for index in range(8):
        simulation.add(make_request(f"r{index}", LONGEST - 50, 20, {"kv_eviction": "expected-attention"}))
    simulation.step()
    assert simulation.workers.most_reserved == 3 * ((HEAD_SIZE + 1) ** 2 + TILE)
    simulation.run(500)
    assert set(simulation.outputs.values()) == {20} and not simulation.ledger.reserve.spans


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_in_flight_share_the_reserve(depth: int) -> None:
    """Memory for ten prompts' KV, read in parts side by side; their sums never exceed one longest prompt."""
    simulation = Simulation(setup(max_num_batched_tokens=4 * LONGEST, long_prefill=300, depth=depth))
    for index in range(8):
        simulation.add(make_request(f"r{index}", LONGEST - 50, 20))
    for index in range(8):
        simulation.add(make_request(f"s{index}", 400, 20))
    simulation.run(500)
    assert simulation.workers.most_reserved == 5 * 400
    assert set(simulation.outputs.values()) == {20}
    assert not simulation.ledger.reserve.spans


def steps_to_read(policy: str, tokens: int, **settings: Any) -> int:
    """In which 200 prompts of 300 tokens are answered, where a step has room for so many tokens."""
    simulation = Simulation(setup("all", max_num_batched_tokens=tokens, **settings))
    for index in range(200):
        simulation.add(make_request(f"r{index}", 300, 2, {"kv_eviction": policy}))
    simulation.run(1000)
    return simulation.steps


@pytest.mark.parametrize("policy", ["h2o", "compactor", "expected-attention"])
@pytest.mark.parametrize(("tokens", "most"), [(512, 1.5), (2048, 1.2), (8192, 1.2)])
def test_short_prompts_are_read_side_by_side(policy: str, tokens: int, most: float) -> None:
    """What one step reads whole needs no place in the reserve, which has room for one of them."""
    assert steps_to_read(policy, tokens) <= most * steps_to_read("snapkv", tokens)


def test_what_is_read_in_parts_has_a_place() -> None:
    """The control: the workers of the simulation check that, and steps that cut all prompts take more of them."""
    assert steps_to_read("compactor", 8192, long_prefill=256) > 100
    assert steps_to_read("snapkv", 8192, long_prefill=256) < 50


@pytest.mark.parametrize("policy", ["h2o", "kvzip"])
def test_who_needs_none_is_not_held_up_by_who_waits(policy: str) -> None:
    """Of those that need the reserve nobody overtakes, short ones neither."""
    simulation = Simulation(setup(policies=policy, max_num_batched_tokens=1024, long_prefill=256))
    fields = {"kv_eviction": policy}
    for name in ("first", "second"):
        simulation.add(make_request(name, LONGEST - 300, 20, fields))
    simulation.add(make_request("third", 400, 20, fields))
    simulation.add(make_request("other", 20, 3, {"kv_eviction": "full"}))
    names = []
    while simulation.scheduler.has_requests():
        admissions = simulation.step().kv_connector_metadata.admissions
        names += [admission.request_id for admission in admissions]
        if len(names) < 3:
            assert not simulation.outputs["first"] or simulation.outputs["other"] == 3
    assert names == ["first", "other", "second", "third"]
    assert not simulation.ledger.reserve.spans


@pytest.mark.parametrize("policy", ["compactor", "kvzip", "h2o"])
def test_the_reserve_goes_to_the_most_urgent(policy: str) -> None:
    simulation = Simulation(setup("all", max_num_batched_tokens=LONGEST, priority=True))
    fields = {"kv_eviction": policy}
    for index in range(100):
        simulation.add(make_request(f"r{index}", 1000, 2, fields, priority=9, arrival=float(index)))
    for _ in range(5):
        simulation.step()
    simulation.add(make_request("urgent", 1000, 2, fields, priority=0, arrival=100.0))
    for _ in range(10):
        simulation.step()
    assert simulation.outputs["urgent"]


@pytest.mark.parametrize("caching", [False, True])
def test_who_computes_prompt_logprobs_waits_and_blocks_nobody(caching: bool) -> None:
    """It begins with no cached prefix, though one is there of all that is evicted of it, and so needs the reserve."""
    settings = {"max_num_batched_tokens": 1024, "long_prefill": 256, "prefix_caching": caching}
    simulation, fields = Simulation(setup(**settings)), {"kv_prefix_len": 1000}
    prompt = list(range(1100))
    simulation.add(make_request("cached", prompt, 2, fields))
    simulation.run(100)
    simulation.add(make_request("holds the reserve", LONGEST - 300, 4))
    asked = make_request("logprobs", prompt, 4, fields)
    asked.skip_reading_prefix_cache = True
    simulation.add(asked)
    simulation.add(make_request("full", 20, 50, {"kv_eviction": "full"}))
    for _ in range(2):
        simulation.step()
    assert list(simulation.ledger.accounts) == ["holds the reserve", "full"]
    assert list(simulation.ledger.reserve.spans) == ["holds the reserve"]
    while not simulation.outputs["holds the reserve"]:
        simulation.step()
    simulation.step()
    assert "logprobs" in simulation.ledger.reserve.spans
    simulation.run(200)
    assert simulation.outputs["logprobs"] == 4


def test_a_place_is_free_again_after_an_abort_and_a_preemption() -> None:
    simulation = Simulation(setup(max_num_batched_tokens=256))
    for name in ("first", "second"):
        simulation.add(make_request(name, LONGEST - 50, 20))
    simulation.step()
    assert list(simulation.ledger.reserve.spans) == ["first"] and len(simulation.scheduler.running) == 1
    simulation.abort("first")
    simulation.step()
    assert list(simulation.ledger.reserve.spans) == ["second"]
    (request,) = simulation.scheduler.running
    simulation.scheduler.running.remove(request)
    simulation.scheduler._preempt_request(request, 0.0)
    assert not simulation.ledger.reserve.spans
    simulation.run(100)
    assert simulation.outputs["second"] == 20


@flights
def test_a_part_of_the_ring_is_a_requests_until_its_prompt_is_evicted(flight: dict[str, Any]) -> None:
    """Or until it is gone; and who needs none waits for none."""
    options = {"policy": "snapkv", "budget": 0.2, "min_prompt": 0, "policies": "all", "lookahead": 8}
    simulation = Simulation(Setup([(2, 2)], [400], 512, ring_parts=1, options=options, **flight))
    for index in range(4):
        simulation.add(make_request(f"ring {index}", 100, 30))
    none = [{"kv_eviction": "knorm"}, {"kv_eviction": "full"}, {"kv_lookahead": 0}]
    for index, fields in enumerate(none):
        simulation.add(make_request(f"none {index}", 100, 30, fields))
    simulation.add(make_request("none, ends before", 100, 9))
    began: dict[str, int] = {}
    evicted: dict[str, int] = {}
    while simulation.scheduler.has_requests():
        admitted = simulation.step().kv_connector_metadata.admissions
        began |= {admission.request_id: simulation.steps for admission in admitted}
        for name, account in simulation.ledger.accounts.items():
            if account.tokens >= 108:
                evicted.setdefault(name, simulation.steps)
        if "ring 1" in began and "ring 2" not in began:
            simulation.abort("ring 1")
    simulation.run(10)
    assert {began[name] for name in began if "none" in name} == {began["ring 0"]} == {1}
    assert began["ring 2"] == began["ring 1"] + 1
    for earlier, later in (("ring 0", "ring 1"), ("ring 2", "ring 3")):
        assert 0 < began[later] - evicted[earlier] <= simulation.setup.depth
    assert simulation.workers is not None and not simulation.workers.ring


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=40))
def test_places_do_not_overlap(steps) -> None:
    reserve = Reserve(100)
    for number, (tokens, leaves) in enumerate(steps):
        if leaves and reserve.spans:
            reserve.release(next(iter(reserve.spans)))
        place = reserve.find(tokens)
        if place is None:
            assert reserve.spans, "an empty reserve has room for every request"
            continue
        reserve.acquire(f"r{number}", place, tokens)
        spans = sorted((span.start, span.stop) for span in reserve.spans.values())
        ends = [0, *(stop for _, stop in spans)]
        assert all(end <= start for end, (start, _) in zip(ends, spans, strict=False)) and ends[-1] <= 100


# The worker.


SIZE_AND_GROWTH = """
from tests.engine.scheduler.test_reserve import _size_and_growth
print(*_size_and_growth())
"""


def test_vllm_finds_it_taken() -> None:
    """On a CPU it reads what the process holds, and memory that was never written does not count.

    In a process that has run no test: this one may have memory of earlier ones, which it would take again.
    """
    ended = command(sys.executable, "-c", SIZE_AND_GROWTH)
    size, grown = map(int, ended.stdout.split()[-2:])
    assert size == 64 << 20
    assert grown > 0.9 * size


def _size_and_growth() -> tuple[int, int]:
    """Bytes of a reserve, and by how many the process grows when it is set aside."""
    model = SimpleNamespace(get_num_attention_heads=lambda parallel: 2)
    vllm_config: Any = SimpleNamespace(model_config=model, parallel_config=None)
    before = psutil.Process().memory_info().rss
    with mock.patch("vllm_kvevict.engine.worker.reserve._evicted_layers", return_value=8):
        reserve = allocate(vllm_config, 1 << 20, torch.device("cpu"))
    return reserve.nbytes, psutil.Process().memory_info().rss - before


@pytest.mark.engine
@pytest.mark.parametrize(
    "settings, size",
    [
        ({"policy": "h2o"}, 1024),
        ({"policy": "full", "policies": ["h2o"]}, 1024),
        ({"policy": "full", "policies": ["all"]}, 33**2 + TILE),
        ({"policy": "full", "policies": ["compactor", "h2o"]}, 1024 + TILE),
        ({"policy": "expected-attention"}, 33**2 + TILE),
        ({"policy": "full"}, 0),
        ({"policy": "criticalkv", "policies": ["snapkv"]}, 0),
    ],
)
def test_who_allows_such_requests_sets_memory_aside(models, settings, size: int) -> None:
    config = {"kv_eviction": settings}
    with engine(models("llama"), additional_config=config, max_model_len=1024):
        reserve = get_runtime().reserve
        assert (0 if reserve is None else len(reserve)) == size
        assert reserve is None or reserve.shape[1] == 4 * 4  # layers x query heads


@pytest.mark.engine
def test_layers_that_are_not_evicted_need_none(models) -> None:
    model = models("gemma3_text")
    with engine(model, additional_config={"kv_eviction": {"policy": "h2o"}}, max_model_len=1024):
        reserve, rank = get_runtime().reserve, get_runtime().rank
        assert rank.evictor.cache.num_layers == len(evicted_layers(model)) < 4
        assert reserve.shape == (1024, len(evicted_layers(model)) * 4)  # query heads


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture, ranks",
    [
        ("llama", {}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("gemma3_text", {}),
    ],
)
def test_side_by_side_as_alone(models, architecture, ranks) -> None:
    """Requests at several places of the reserve keep what they keep with all of it to themselves."""
    # Windows cannot forget what kvzip repeats.
    policies = RESERVING if architecture == "llama" else [name for name in RESERVING if name != "kvzip"]
    asks = [
        Ask(length, policies[index % 3], 0.3, seed=length, max_tokens=4)
        for index, length in enumerate((130, 250, 90, 400, 111, 300))
    ]
    settings = {"max_model_len": 512, "max_num_batched_tokens": 200, **ranks}
    with evicting_engine(models(architecture), **settings) as llm:
        together = run(llm, [*asks, *asks])
        for index, ask in enumerate(asks):
            (alone,) = run(llm, [ask])
            for answer in (together[index], together[index + len(asks)]):
                assert (answer.kept, answer.tokens) == (alone.kept, alone.tokens)


@pytest.mark.engine
def test_only_what_steps_cut_is_kept_between_them(models, monkeypatch) -> None:
    """Of the window's queries a step that has them all leaves nothing; the averaged probe keeps no step's queries."""
    kept: dict[str, list[int]] = {}

    def record(worker: Any) -> None:
        after = Eviction.after_attention

        def recording(eviction, step, rows):
            after(eviction, step, rows)
            held = [eviction.collected.window, *getattr(eviction, "probe", {}).values()]
            sizes = [x.untyped_storage().nbytes() for x in held if x is not None]
            kept.setdefault(eviction.phase.config.policy, []).extend(sizes)

        monkeypatch.setattr(Eviction, "after_attention", recording)

    row = 4 * 32 * 4  # query heads, head size, fp32
    settings = {"max_num_batched_tokens": 256, "max_model_len": 512}
    take = {"policy": "take", "take_chunk": 100, "min_prompt": 0}
    with engine(models("llama"), additional_config={"kv_eviction": take}, **settings) as llm:
        llm.collective_rpc(record)
        run(llm, [Ask(330, "snapkv", 0.2)], recorded=False)
        run(llm, [Ask(270, "lava", 0.2)], recorded=False)  # the first step ends within the window
        run(llm, [Ask(330, "take", 0.2)], recorded=False)
    assert kept["snapkv"] == []
    assert set(kept["lava"]) == {4 * 32 * row}  # layers, window
    assert set(kept["take"]) == {32 * row}


# Requests.


@pytest.mark.parametrize(
    "policies, allowed, refused",
    [
        ("unreserved", ["snapkv", "full", "take"], RESERVING),
        ([], ["ada-snapkv", "full"], ["snapkv", "h2o"]),
        (["snapkv"], ["ada-snapkv", "full", "snapkv"], ["lava", "h2o"]),
        (["unreserved", "h2o"], ["snapkv", "h2o"], []),
        ("all", ["snapkv", "h2o"], []),
        (["all"], ["snapkv", "h2o"], []),
        ("h2o", ["h2o", "full"], ["snapkv"]),
    ],
)
def test_policies_that_requests_may_choose(models, policies, allowed, refused) -> None:
    args = {"kv_eviction": "ada-snapkv", "kv_eviction_config": {"policies": policies, "min_prompt": 0}}
    processor = InputProcessor(EngineArgs(str(models("llama")), **args).create_engine_config())

    def process(policy: str) -> None:
        params = SamplingParams(max_tokens=4, extra_args={"kv_eviction": policy})
        processor.process_inputs("r", {"prompt_token_ids": [7] * 300}, params, ("generate",))

    for policy in allowed:
        process(policy)
    for policy in refused:
        with pytest.raises(
            VLLMValidationError, match=f"^kv_eviction: requests may not choose {policy} "
        ) as error:
            process(policy)
        assert error.value.parameter == "kv_eviction"


def test_the_servers_own_policy_needs_no_permission() -> None:
    for policy in available():
        options = Options.parse({"policy": policy, "policies": []})
        assert options.allows(policy) and options.allows("full")
        assert options.reserved_for == ([policy] if needs_reserve(policy) else [])
