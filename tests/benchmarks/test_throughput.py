"""Scenarios, targets and workloads; no engine is started."""

from dataclasses import replace

import pytest

from benchmarks.sides import Outcome, Workload
from benchmarks.throughput import BLOCK, SCENARIOS, TOKEN_BYTES, Target, compare, parse_arguments, targets


def outcome(wall: float, peak: int = 4, preemptions: int = 0) -> Outcome:
    steps = [(0.5, 2048, 1), (0.25, 0, 1), (0.25, 0, 1)]
    return Outcome(wall, wall, 100, peak, preemptions, steps)


def test_targets_are_met_at_their_bound():
    assert Target("at least", 12, 12).met and Target("at most", 2, 2, at_most=True).met
    assert not Target("at least", 11, 12).met and not Target("at most", 3, 2, at_most=True).met
    assert "MISSED" in str(Target("at least", 11, 12))


def test_pool_bound_targets_take_the_worst_run():
    stock, ours = [outcome(3.0), outcome(3.0)], [outcome(2.0, peak=13), outcome(2.0, peak=11, preemptions=3)]
    speed = compare(stock, ours, lambda run: run.output_tokens / run.wall)
    assert speed.median == pytest.approx(1.5)
    assert [target.met for target in targets("pool-bound", speed, ours)] == [False, False, True]
    assert targets("prefill-bound", speed, ours) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_pool_holds_as_many_full_requests_as_it_says(name):
    scenario = SCENARIOS[name]
    blocks = scenario.kv_bytes() // (BLOCK * TOKEN_BYTES)
    per_request = -(-(scenario.input_len + scenario.output_len) // BLOCK)
    assert (blocks - 1) // per_request == scenario.pool  # vLLM keeps one block


def test_options_change_the_scenario():
    arguments, scenario = parse_arguments(["overhead", "--requests", "3", "--budget", "0.5"])
    assert scenario == replace(SCENARIOS["overhead"], requests=3, budget=0.5)
    assert arguments.pairs >= 7
    with pytest.raises(SystemExit):
        parse_arguments(["overhead", "--requests", "0"])


def test_workloads_never_repeat_a_prompt():
    first, again, other = Workload(3, 64, 1, 0), Workload(3, 64, 1, 0), Workload(3, 64, 1, 1)
    assert first.prompts() == again.prompts()
    prompts = [tuple(prompt) for prompt in first.prompts() + other.prompts()]
    assert len(set(prompts)) == 6 and {len(prompt) for prompt in prompts} == {64}


def test_steps_with_and_without_prompt_tokens_are_told_apart():
    run = outcome(1.0)
    assert (run.prefill_seconds, run.decode_seconds) == (0.5, 0.5)
    assert run.summary()["steps"] == 3
