"""Loads, and what a run is made of; the server and vLLM's client are replaced by fakes."""

import asyncio
import inspect
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.benchmarks import serve as client

from benchmarks.harness import load, server
from benchmarks.harness.load import INT8, Load, drive, entry_bytes, longest, page_bytes, summarise
from benchmarks.harness.server import ServerError, Snapshot, cpu_environment, run_benchmark

KV_BYTES = 1_000_000
METRICS = """\
vllm:num_requests_running{engine="0"} 5.0
vllm:kv_eviction_physical_pages{engine="0",rank="0"} 10.0
vllm:kv_eviction_physical_pages{engine="0",rank="1"} 30.0
# TYPE vllm:kv_eviction_decision_seconds histogram
vllm:kv_eviction_decision_seconds_bucket{engine="0",phase="prefill",le="+Inf"} 3.0
vllm:kv_eviction_decision_seconds_sum{engine="0",phase="prefill"} 0.75
vllm:kv_eviction_decision_seconds_sum{engine="0",phase="decode"} 0.5
vllm:spec_decode_num_draft_tokens_total 9.0
"""
NAMES = [
    f"{of}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for of in ("mean", "p50", "p90", "p99")
]


def client_result(work: Load, **changes) -> dict:
    """What vLLM's client returns for a load whose answers took 2 s."""
    inputs, outputs = zip(*((len(prompt), length) for prompt, length in work.prompts()), strict=True)
    counts = {"duration": 2.0, "completed": len(inputs), "failed": 0, "errors": [""] * len(inputs)}
    lengths = {"input_lens": inputs, "output_lens": outputs, "total_output_tokens": sum(outputs)}
    return counts | lengths | dict.fromkeys(NAMES, 40.0) | changes


class FakeServer:
    """Answers with given snapshots in turn; its processes use a CPU second between two looks."""

    def __init__(self, log: Path, *snapshots: Snapshot, ended: bool = False):
        self.log, self.snapshots, self.seconds, self.ended = log, list(snapshots), 0.0, ended
        log.write_text("a line of the log\n")

    async def snapshot(self) -> Snapshot:
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def cpu_seconds(self) -> float:
        self.seconds += 1
        return self.seconds

    def check(self) -> None:
        if self.ended:
            raise ServerError("vllm serve ended")


def run_with(
    monkeypatch, server: FakeServer, work: Load, result: dict, seconds: float = 0.0, dtype="float32"
):
    """Drive a load whose client returns this result."""

    async def send(*_) -> dict:
        await asyncio.sleep(seconds)
        return result

    monkeypatch.setattr(load, "_send", send)
    monkeypatch.setattr(load, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0)
    return asyncio.run(drive(server, work, KV_BYTES, dtype))


def test_prompts_are_the_same_for_all_sides_and_never_repeat():
    work = Load(3, 64, 1)
    others = [replace(work, seed=1), replace(work, output_len=2), replace(work, rate=1.0)]
    assert work.prompts() == Load(3, 64, 1).prompts()
    prompts = [tuple(prompt) for one in (work, *others) for prompt, _ in one.prompts()]
    assert len(set(prompts)) == 12 and {len(prompt) for prompt in prompts} == {64}


def test_lengths_stay_within_the_spread():
    drawn = Load(500, 100, 10, spread=0.3).prompts()
    inputs, outputs = [len(prompt) for prompt, _ in drawn], [length for _, length in drawn]
    assert (min(inputs), max(inputs)) == (70, 130) and (min(outputs), max(outputs)) == (7, 13)
    assert (longest(100, 0.3), longest(10, 0.3)) == (130, 13)
    assert {length for _, length in Load(50, 100, 1, spread=0.9).prompts()} == {1}


@pytest.mark.parametrize("dtype, entry", [("bfloat16", 256), ("float32", 512), (INT8, 2 * 64 + 2 * 4)])
def test_a_run_counts_from_its_own_start(tmp_path, monkeypatch, dtype, entry):
    work = Load(4, 16, 8)
    before = Snapshot(preemptions=5, evictions=7, decision_seconds=1.0, compaction_seconds=1.0)
    busy = replace(before, running=3, physical_pages=100, logical_entries=2000)
    after = replace(before, preemptions=6, evictions=11, decision_seconds=1.25, compaction_seconds=1.15)
    server = FakeServer(tmp_path / "log", before, busy, after)
    run = run_with(monkeypatch, server, work, client_result(work), dtype=dtype)
    assert (run.wall, run.cpu, run.completed, run.output_tokens) == (2.0, 1.0, 4, 32)
    assert (run.peak_running, run.preemptions, run.evictions) == (3, 1, 4)
    assert (run.physical_bytes, run.logical_bytes) == (100 * 32 * entry, 2000 * entry)
    assert run.evict_share == pytest.approx(0.2)
    assert (run.tokens_per_second, run.tokens_per_cpu_second, run.requests_per_second) == (16, 32, 2)
    assert run.latency["e2e"] == {"mean": 0.04, "p50": 0.04, "p90": 0.04, "p99": 0.04}
    assert run.summary()["tokens_per_second"] == 16


@pytest.mark.parametrize(
    "seen, physical, logical",
    [
        ([{"physical_pages": 5, "logical_entries": 90}, {"physical_pages": 9, "logical_entries": 70}], 9, 70),
        ([{"kv_usage": 0.5}, {"kv_usage": 0.25}], None, None),  # stock vLLM tells no more
    ],
)
def test_memory_is_read_at_its_peak(seen, physical, logical):
    result, found = client_result(Load(2, 8, 1)), [Snapshot(**one) for one in seen]
    run = summarise(result, 1.0, Snapshot(), found, Snapshot(), KV_BYTES, "float32")
    assert run.physical_bytes == (physical * page_bytes("float32") if physical else KV_BYTES / 2)
    assert run.logical_bytes == (logical * entry_bytes("float32") if logical else None)
    assert set(run.latency) == {"ttft", "e2e"}  # of answers of one token


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"failed": 1, "errors": ["Traceback\nConnectionError: gone", ""]},
            "1 of 2 .*gone.*\na line of the log",
        ),
        ({"output_lens": [8, 7]}, "other lengths"),
        ({"input_lens": [16, 15]}, "other lengths"),
    ],
)
def test_no_figures_from_failed_requests(tmp_path, monkeypatch, changes, message):
    work, server = Load(2, 16, 8), FakeServer(tmp_path / "log", Snapshot())
    with pytest.raises(ServerError, match=message):
        run_with(monkeypatch, server, work, client_result(work, **changes))


def test_no_waiting_for_a_server_that_ended(tmp_path, monkeypatch):
    with pytest.raises(ServerError, match="ended"):
        run_with(monkeypatch, FakeServer(tmp_path / "log", Snapshot(), ended=True), Load(2, 16, 8), {}, 60)


def test_metrics_of_all_ranks_and_phases_are_added_up():
    expected = Snapshot(running=5, physical_pages=40, decision_seconds=1.25, draft_tokens=9)
    assert Snapshot.parse(METRICS) == expected and Snapshot.parse("") == Snapshot()


@pytest.mark.parametrize(
    "cores, threads, ranks, bound",
    [
        ({0, 1}, 1, 1, "0"),
        ({0, 1}, 2, 1, "nobind"),
        ({0, 1}, 1, 2, "nobind"),
        ({2, 3, 5, 7, 8}, 2, 2, "2,3|5,7"),
    ],
)
def test_ranks_are_bound_where_a_core_is_left(monkeypatch, cores, threads, ranks, bound):
    monkeypatch.setattr(server, "os", SimpleNamespace(sched_getaffinity=lambda _: cores))
    env = cpu_environment(threads, ranks)
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == (bound, str(threads))


def test_servers_keep_idle_connections_longer_than_the_client():
    (kept,) = re.findall(r"keepalive_timeout=(\d+)", inspect.getsource(client))
    assert int(cpu_environment(1, 1)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > int(kept)


def test_sigterm_lets_servers_be_ended(capsys):
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script's background jobs
    try:
        assert run_benchmark(work()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended and "interrupted" in capsys.readouterr().err
