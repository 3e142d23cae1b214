"""Sides, figures and targets of the benchmark of long answers; no server is started."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import reasoning
from benchmarks.harness import scenarios
from benchmarks.harness.load import PAGE
from benchmarks.harness.measure import RESULTS
from benchmarks.harness.scenarios import BLOCK, STOCK, make_server, token_bytes
from benchmarks.harness.server import Snapshot
from benchmarks.reasoning import QUICK, SCENARIOS, evicting_share, parse_arguments, summary, targets
from tests.benchmarks.runs import ours, run_of

LONG, FITS = SCENARIOS["long"], SCENARIOS["fits"]


def rounds_of(scenario: reasoning.Scenario, wall: float, seconds: float = 0.0, **changes) -> list[dict]:
    """Three rounds in which stock vLLM takes 10 s, and prompts 1 s."""

    def run(turn):
        if turn.output_len == 1:
            return run_of(1.0)
        if turn.side == STOCK:
            return run_of(10.0)
        return replace(ours(wall, **changes), answer_seconds=seconds, answer_evictions=20)

    return [{turn.name: run(turn) for turn in scenario.turns()} for _ in range(3)]


def test_sides_differ_in_the_eviction_only(monkeypatch, tmp_path):
    monkeypatch.setattr(scenarios, "model", lambda max_len: tmp_path)
    both = replace(LONG, policies=("ada-snapkv", "snapkv"))
    stock, one, other = (make_server(both, side, threads=None).command for side in both.sides)
    for policy, flags in (("ada-snapkv", one), ("snapkv", other)):
        assert flags[-10:] == [
            *("--kv-eviction", "ada-snapkv", "--kv-budget", "1", "--kv-decode-budget", "448"),
            *("--kv-eviction-config.decode_interval", "128"),
            *("--kv-eviction-config.decode_policy", policy),
        ]
        port = flags.index("--port") + 1
        assert stock[:port] + stock[port + 1 :] == flags[:port] + flags[port + 1 : -10]


def test_each_evicting_side_also_computes_the_prompts_alone():
    turns = {turn.name: (turn.side, turn.output_len) for turn in LONG.turns()}
    alone = {"ada-snapkv, prefill": ("ada-snapkv", 1)}
    assert turns == {"stock": ("stock", 4096), "ada-snapkv": ("ada-snapkv", 4096), **alone}
    assert [turn.name for turn in FITS.turns()] == ["stock", "ada-snapkv"]


def test_twelve_bounded_requests_fit_the_memory_of_three_whole_ones():
    pages = LONG.kv_bytes() // token_bytes(LONG.dtype) // PAGE
    bounded = LONG.input_len + LONG.decode_budget + LONG.decode_interval
    # Heads that compete end anywhere in a page: one page more in each row.
    assert (pages - BLOCK // PAGE) // (bounded // PAGE + 1) == reasoning.AT_ONCE
    assert FITS.output_len == FITS.decode_budget + FITS.decode_interval and not FITS.evicts and LONG.evicts


def test_evictions_are_held_against_the_time_of_decoding():
    assert evicting_share("ada-snapkv", rounds_of(LONG, wall=5.0, seconds=0.4)).median == 0.1


@pytest.mark.parametrize("level, dtype, bound", [("avx512", "bfloat16", 2.4), ("avx2", "float32", 2.0)])
def test_targets(at_level, level, dtype, bound):
    at_level(level)
    scenario = replace(LONG, dtype=dtype)
    met = targets("long", scenario, rounds_of(scenario, wall=10 / bound, seconds=0.1, peak=12))
    assert [target.bound for target in met] == [bound, 12, 0, 0.08] and all(target.met for target in met)
    missed = targets("long", scenario, rounds_of(scenario, wall=6.0, seconds=1.0, peak=11, preemptions=1))
    assert not any(target.met for target in missed)
    for wall, verdict in ((10.2, True), (10.5, False)):
        (target,) = targets("fits", FITS, rounds_of(FITS, wall))
        assert target.met == verdict


def test_only_the_scenarios_own_sizes_and_policy_are_judged(at_level):
    at_level("avx512")
    console = Console(file=io.StringIO(), width=130)
    content = summary("long", LONG, rounds_of(LONG, 4.0, 0.1), console)
    assert len(content["targets"]) == 4
    assert content["evicting"]["ada-snapkv"]["milliseconds"]["median"] == pytest.approx(5)
    assert "20 evictions of 5 [5, 5] ms" in console.file.getvalue()
    both = replace(LONG, policies=("ada-snapkv", "snapkv"))
    assert len(summary("long", both, rounds_of(both, 4.0, 0.1), console)["targets"]) == 4
    for other in (replace(LONG, policies=("snapkv",)), replace(LONG, requests=3)):
        assert not summary("long", other, rounds_of(other, 4.0, 0.1), console)["targets"]
    assert not summary("fits", FITS, rounds_of(FITS, 9.0), console)["evicting"]


def test_command_line(monkeypatch):
    arguments, chosen = parse_arguments(["--dtype", "bfloat16"])
    assert chosen == SCENARIOS and arguments.threads is None
    arguments, chosen = parse_arguments(
        ["long", "--quick", "--requests", "5", "--threads", "1", "--policy", "snapkv", "--dtype", "bfloat16"]
    )
    assert chosen == {"long": replace(QUICK["long"], requests=5, policies=("snapkv",))}
    assert arguments.threads == 1
    with pytest.raises(SystemExit):
        parse_arguments(["--policy", "h2o"])
    folders = []
    monkeypatch.setattr(reasoning.command, "measure", lambda *arguments: folders.append(arguments[-1]))
    monkeypatch.setattr(reasoning, "run_benchmark", lambda work: 0)
    for words in ([], ["--quick"]):
        monkeypatch.setattr("sys.argv", ["reasoning", *words])
        assert reasoning.main() == 0
    assert folders == [RESULTS, scenarios.SCRATCH]


def test_evictions_of_answers_are_read_from_the_metrics():
    text = "".join(
        f'vllm:kv_eviction_{name}{{engine="0",phase="{phase}"}} {value}\n'
        for phase, values in (("prefill", (1.0, 2.0, 9.0)), ("decode", (0.25, 0.5, 4.0)))
        for name, value in zip(
            ("decision_seconds_sum", "compaction_seconds_sum", "evictions_total"), values, strict=True
        )
    )
    snapshot = Snapshot.parse(text)
    assert (snapshot.answer_evictions, snapshot.answer_seconds) == (4, 0.75)
    assert (snapshot.evictions, snapshot.decision_seconds, snapshot.compaction_seconds) == (13, 1.25, 2.5)
