"""The comparison with kvpress, without kvpress and without an engine: a small program plays the worker."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.scenarios import KV_HEADS, LAYERS
from benchmarks.harness.sides import Outcome, Workload
from benchmarks.kvpress import environment
from benchmarks.kvpress.__main__ import (
    FULL,
    PLAIN,
    alone,
    batched,
    make_turns,
    ours,
    parse_arguments,
    ratios,
    run_rounds,
    runs_table,
    targets,
)
from benchmarks.kvpress.check import check, describe, require_same
from benchmarks.kvpress.environment import kvpress_python
from benchmarks.kvpress.opponent import Opponent, OpponentError
from benchmarks.kvpress.runs import Run, faster, from_outcome, run_batches

WORKER = """
import json, os, sys
versions, threads = {"kvpress": "0", "dtype": sys.argv[2]}, int(os.environ["OMP_NUM_THREADS"])
print(json.dumps({"versions": versions, "threads": threads}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    prompts, length = order["prompts"], order["output_len"]
    if order["press"] == "ada-snapkv" and len(prompts) > 1:
        answer = {"error": "ValueError: no batches"}
    elif -1 in prompts[0]:
        break
    else:
        answer = {"wall": 2.0, "cpu": 1.0, "prefill": 0.5, "decode": 1.5, "ids": [[7] * length for _ in prompts],
                  "likely": [[7, 8, 9, 10, 11]] * len(prompts), "stored_bytes": 1000 * len(prompts),
                  "attended_entries": 320}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture(params=["bfloat16", "float32"])
def opponent(request, worker: Path, tmp_path: Path):
    with closing(
        Opponent(Path(sys.executable), tmp_path, 1, request.param, worker, tmp_path / "log")
    ) as opponent:
        opponent.wait()
        yield opponent


class FakeSide:
    """An engine whose answers are prepared."""

    def run(self, work: Workload, **sampling) -> Outcome:
        steps = [(0.4, work.requests * work.input_len, 2), (0.6, 0, 2)]
        return Outcome(1.0, 0.5, work.requests * work.output_len, work.requests, 0, steps)

    def call(self, work, workload: Workload, policy: str) -> dict:
        entries = 0 if policy == "full" else workload.requests * LAYERS * KV_HEADS * 10
        return {
            "ids": [[7] * workload.output_len, [7, 1][: workload.output_len]],
            "entries": entries,
            "pages": 5,
        }


def test_worker_answers_and_says_its_versions(opponent: Opponent):
    assert opponent.versions == {"kvpress": "0", "dtype": opponent.dtype}
    assert opponent.generate([[1, 2]], 3, "snapkv", 0.2)["ids"] == [[7, 7, 7]]


def test_worker_that_ends_or_counts_other_threads_is_an_error(
    worker: Path, opponent: Opponent, tmp_path: Path
):
    with pytest.raises(OpponentError, match="ended"):
        opponent.generate([[-1]], 3, None, 1.0)
    with closing(Opponent(Path(sys.executable), tmp_path, 2, "float32", worker, tmp_path / "log2")) as other:
        other.threads = 1
        with pytest.raises(OpponentError, match="2 threads instead of 1"):
            other.wait()


def test_batches_add_up_and_failed_ones_cost_nothing(opponent: Opponent):
    prompts = [[1, 2], [3, 4], [5, 6]]
    run = run_batches(opponent, prompts, 1, 4, "ada-snapkv", 0.2)
    assert (run.wall, run.cpu, run.prefill, run.decode) == (6.0, 3.0, 1.5, 4.5)
    assert (run.output_tokens, run.answered, run.decode_steps, run.stored_bytes) == (12, 3, 9, 3000)
    assert run.tokens_per_second == 2.0 and run.step_ms == 500.0
    whole = run_batches(opponent, prompts, 3, 4, "ada-snapkv", 0.2)
    assert whole.errors == ["ValueError: no batches"]
    assert (whole.answered, whole.wall, whole.tokens_per_second, whole.step_ms) == (0, 0.0, 0.0, 0.0)
    partly = run_batches(opponent, prompts, 2, 4, "ada-snapkv", 0.2)  # the third is alone
    assert (partly.answered, partly.output_tokens, len(partly.errors)) == (1, 4, 1)


def test_our_run_tells_prefill_from_decode():
    outcome = Outcome(3.0, 2.5, 20, 2, 0, [(1.0, 64, 1), (0.5, 0, 2), (0.25, 0, 2)])
    run = from_outcome(outcome, Workload(2, 32, 10))
    assert (run.prefill, run.decode, run.decode_steps, run.step_ms) == (1.0, 0.75, 2, 375.0)
    with pytest.raises(RuntimeError, match="read 64 of 66 prompt tokens"):  # the others came from a cache
        from_outcome(outcome, Workload(2, 33, 10))


def of(speed: float, failures: int = 0, answered: int = 8) -> Run:
    """A run of one second."""
    tokens = int(speed) if answered else 0
    return Run(1.0, 0.5, 0.4, 0.6, 10, tokens, answered, ["ValueError"] * failures)


def test_the_faster_way_of_each_round_counts():
    good = {"batch": of(10), "single": of(5)}
    slow = {"batch": of(4), "single": of(5)}
    failed = {"batch": of(0, failures=1, answered=0), "single": of(5, failures=2, answered=6)}
    hopeless = {"batch": of(0, failures=1, answered=0), "single": of(0, failures=8, answered=0)}
    assert faster([good, slow, failed], "batch", "single") == [
        good["batch"],
        slow["single"],
        failed["single"],
    ]
    assert faster([good, hopeless], "batch", "single") is None


def test_targets_are_missed_when_the_interval_reaches_below(at_level):
    at_level("avx512")

    def one(speed: float, batch: Run) -> dict:
        return {ours("snapkv"): of(speed), batched("snapkv"): batch, alone("snapkv"): of(10)}

    (met,) = targets([one(speed, of(10)) for speed in (60, 55, 70)], ["snapkv"], "bfloat16")
    assert met.met and "faster way" in met.name
    (missed,) = targets([one(speed, of(10)) for speed in (60, 49, 70)], ["snapkv"], "bfloat16")
    assert not missed.met and "MISSED" in str(missed)
    (fallback,) = targets([one(60, of(0, 1, 0)), one(60, of(30))], ["snapkv"], "bfloat16")
    assert fallback.value.low == 2.0 and fallback.value.high == 6.0  # of the batch where there is one
    assert targets([one(60, of(10))], ["snapkv"], "float32") == []
    at_level("avx2")
    assert targets([one(60, of(10))], ["snapkv"], "bfloat16") == []


def test_a_round_has_every_side_and_new_prompts(opponent: Opponent):
    arguments = parse_arguments(["--requests", "2", "--input-len", "400"])
    engines = {policy: FakeSide() for policy in arguments.policies}
    turns = make_turns(arguments, engines, opponent)
    names = [turn.side for turn in turns]
    assert names[:2] == [FULL, PLAIN] and len(names) == len(set(names)) == 8

    rounds = run_rounds(turns, Workload(2, 400, 4), 3)
    assert len(rounds) == 3 and all(list(one) == names for one in rounds)
    compared = ratios(rounds, arguments.policies)
    pair = f"{ours('snapkv')} / {batched('snapkv')}"
    assert compared[pair]["output tokens/s"].median == pytest.approx(2.0)  # 1 second against 2
    assert compared[f"{ours('ada-snapkv')} / {batched('ada-snapkv')}"]["output tokens/s"] is None
    console = Console(record=True, width=160, quiet=True)
    console.print(runs_table("title", rounds))


def test_check_compares_tokens_and_entries(opponent: Opponent):
    found = check(FakeSide(), opponent, Workload(2, 8, 2), "snapkv", 0.2)
    assert (found["same_first"], found["likely_first"], found["same_tokens"]) == (1.0, 1.0, 0.75)
    assert found["ours_kept"] == found["kvpress_attends"] == 10.0
    stored = 1000 / (2 * 64 * {"bfloat16": 2, "float32": 4}[opponent.dtype])
    assert found["kvpress_stores"] == pytest.approx(stored / (LAYERS * KV_HEADS))
    assert "ours keeps 10.0" in describe("snapkv", found)
    assert "ours_kept" not in check(FakeSide(), opponent, Workload(2, 8, 2), None, 1.0)
    assert "answered no request" in describe("snapkv", {"requests": 0})


SAME = {
    "requests": 8,
    "same_first": 1.0,
    "likely_first": 1.0,
    "kvpress_attends": 409.0,
    "kvpress_stores": 409.0,
}


@pytest.mark.parametrize("wrong", [{"likely_first": 0.5}, {"ours_kept": 500.0}, {"kvpress_attends": 300.0}])
def test_what_does_not_compute_the_same_is_not_compared(wrong):
    kept = SAME | {"ours_kept": 409.4}
    require_same({"no eviction": SAME, "snapkv": kept, "ada-snapkv": {"requests": 0}})
    with pytest.raises(RuntimeError, match="snapkv: 8 requests"):
        require_same({"no eviction": SAME, "snapkv": kept | wrong})


def installer(calls: list):
    """Instead of subprocess.run: notes the commands."""

    def run(command, **options):
        calls.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    return run


def test_environment_is_built_once(tmp_path, monkeypatch):
    calls: list = []
    monkeypatch.setattr(environment.subprocess, "run", installer(calls))
    folder = tmp_path / "venv"
    python = kvpress_python(Console(quiet=True), folder)
    assert python == folder / "bin/python" and len(calls) == 4
    assert "kvpress==0.5.5" in calls[-1] and environment.TORCH in calls[-1]
    assert kvpress_python(Console(quiet=True), folder) == python and len(calls) == 4
    (folder / ".installed").write_text("kvpress==0.5.4")
    kvpress_python(Console(quiet=True), folder)
    assert len(calls) == 8
