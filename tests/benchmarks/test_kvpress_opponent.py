"""The comparison with kvpress, without kvpress and without an engine: a small program plays the worker."""

import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from benchmarks.harness.measure import Estimate
from benchmarks.harness.sides import Outcome, Workload
from benchmarks.kvpress import __main__ as kvpress
from benchmarks.kvpress.__main__ import (
    FIGURES,
    FULL,
    OURS,
    PLAIN,
    POLICY,
    SPEED,
    THEIRS,
    all_read,
    make_turns,
    ratios,
    run_rounds,
)
from benchmarks.kvpress.check import check, require_same
from benchmarks.kvpress.opponent import Opponent, OpponentError
from benchmarks.micro import loop

WORKER = """
import json, os, sys
versions, threads = {"kvpress": "0", "dtype": sys.argv[2]}, int(os.environ["OMP_NUM_THREADS"])
print(json.dumps({"versions": versions, "threads": threads}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    prompts, length = order["prompts"], order["output_len"]
    if -1 in prompts[0]:
        break
    wall = 5.0 if order["press"] else 8.0
    answer = {"wall": wall, "cpu": 1.0, "steps": [(0.5, 6, 3), (1.5, 0, 3)], "ids": [[7] * length for _ in prompts],
              "likely": [[7, 8, 9, 10, 11]] * len(prompts), "entries": 320}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def opponent(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    process = Opponent(Path(sys.executable), tmp_path, 1, "float32", worker, tmp_path / "log")
    with closing(process) as opponent:
        yield opponent


class FakeSide:
    """An engine whose answers are prepared."""

    def run(self, work: Workload, **sampling) -> Outcome:
        steps = [(0.4, work.requests * work.input_len, 2), (0.6, 0, 2)]
        wall = 2.0 if sampling["extra_args"]["kv_eviction"] == "full" else 1.0
        return Outcome(wall, 0.5, work.requests * work.output_len, steps)

    def call(self, work, workload: Workload, policy: str) -> tuple[list[list[int]], int]:
        return [[7] * workload.output_len, [8] * workload.output_len], 0 if policy == "full" else 321


def test_worker_says_its_versions_and_answers_until_it_ends(opponent: Opponent):
    opponent.wait()
    assert opponent.versions == {"kvpress": "0", "dtype": "float32"}
    run = opponent.run(Workload(3, 2, 4), "snapkv", 0.2)
    assert (run.wall, run.output_tokens, run.prefill_seconds, run.decode_seconds) == (5.0, 12, 0.5, 1.5)
    with pytest.raises(OpponentError, match="ended"):
        opponent.generate([[-1]], 3, None, 1.0)


def test_figures_of_a_run_whose_prompts_were_read():
    outcome = Outcome(3.0, 2.5, 20, [(1.0, 64, 1), (0.5, 0, 2), (0.25, 0, 2)])
    run = all_read(outcome, Workload(2, 32, 10))
    assert [figure(run) for figure in FIGURES.values()] == [20 / 3, 8.0, 375.0]
    with pytest.raises(RuntimeError, match="read 64 of 66 prompt tokens"):  # the others came from a cache
        all_read(outcome, Workload(2, 33, 10))


def test_a_round_has_every_side_and_new_prompts(opponent: Opponent):
    opponent.wait()
    seen: list[tuple[str, int]] = []
    turns = {
        name: lambda work, name=name, turn=turn: seen.append((name, work.seed)) or turn(work)
        for name, turn in make_turns(FakeSide(), opponent, 0.2).items()
    }
    compared = ratios(run_rounds(turns, Workload(2, 400, 4), 3))
    assert seen == [(name, seed) for seed in (-1, 1, 2, 3) for name in (FULL, PLAIN, OURS, THEIRS)]
    speeds = {pair: of["output tokens/s"].median for pair, of in compared.items()}
    assert speeds == {f"{FULL} / {PLAIN}": 4.0, f"{OURS} / {THEIRS}": 5.0}  # 2 seconds against 8, 1 against 5


def test_what_was_compared_is_printed_and_saved(opponent: Opponent, monkeypatch, at_level):
    at_level("avx512")
    opponent.wait()
    saved: dict = {}
    monkeypatch.setattr(loop, "save", lambda name, content: saved.update({name: content}))
    monkeypatch.setattr(kvpress, "started", lambda arguments: nullcontext((FakeSide(), opponent)))
    words = "--requests 2 --input-len 400 --output-len 4 --dtype"
    assert loop.run("kvpress", kvpress, [*words.split(), "bfloat16"]) == 0
    results = saved["kvpress"]["results"]
    assert len(results["rounds"]) == 3 and len(results["ratios"]) == 2
    (target,) = results["targets"]
    assert target["name"].endswith(f"{OURS} / {THEIRS}") and (target["bound"], target["met"]) == (5.0, True)
    slower = {f"{OURS} / {THEIRS}": {SPEED: Estimate(4.9, 4.8, 5.0)}}
    assert [target.met for target in kvpress.targets(slower, "bfloat16")] == [False]
    assert loop.run("kvpress", kvpress, [*words.split(), "float32"]) == 0
    assert not saved["kvpress-avx512-float32"]["results"]["targets"]  # the target is that of another kind


@pytest.mark.parametrize("wrong", [{"likely_first": 0.5}, {"ours_kept": 500}, {"kvpress_keeps": 300}])
def test_what_does_not_compute_the_same_is_not_compared(wrong, opponent: Opponent):
    opponent.wait()
    kept = check(FakeSide(), opponent, Workload(2, 8, 2), "snapkv", 0.2)
    plain = check(FakeSide(), opponent, Workload(2, 8, 2), None, 1.0)
    assert (kept["ours_kept"], kept["kvpress_keeps"]) == (321, 320) and "ours_kept" not in plain
    require_same({"no eviction": plain, POLICY: kept})
    with pytest.raises(RuntimeError, match="not compute the same: snapkv"):
        require_same({"no eviction": plain, POLICY: kept | wrong})
