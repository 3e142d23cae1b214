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
from benchmarks.harness.load import Load, drive, entry_bytes, longest, page_bytes, summarise
from benchmarks.harness.server import ServerError, Snapshot, cpu_environment, run_benchmark

KV_BYTES = 1_000_000
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 5.0
# TYPE vllm:kv_eviction_physical_pages gauge
vllm:kv_eviction_physical_pages{engine="0",rank="0"} 10.0
vllm:kv_eviction_physical_pages{engine="0",rank="1"} 30.0
# TYPE vllm:kv_eviction_logical_kv_tokens gauge
vllm:kv_eviction_logical_kv_tokens{engine="0",rank="0"} 300.0
vllm:kv_eviction_logical_kv_tokens{engine="0",rank="1"} 900.0
# TYPE vllm:kv_eviction_decision_seconds histogram
vllm:kv_eviction_decision_seconds_bucket{engine="0",le="0.1"} 2.0
vllm:kv_eviction_decision_seconds_bucket{engine="0",le="+Inf"} 3.0
vllm:kv_eviction_decision_seconds_count{engine="0"} 3.0
vllm:kv_eviction_decision_seconds_sum{engine="0"} 0.75
"""


def client_result(work: Load, **changes) -> dict:
    """What vLLM's client returns for a load whose answers took 2 s."""
    prompts = work.prompts()
    outputs = [length for _, length in prompts]
    milliseconds = {
        f"{statistic}_{name}_ms": 40.0
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "p50", "p90", "p99")
    }
    return {
        "duration": 2.0,
        "completed": len(prompts),
        "failed": 0,
        "total_input_tokens": sum(len(prompt) for prompt, _ in prompts),
        "total_output_tokens": sum(outputs),
        "input_lens": [len(prompt) for prompt, _ in prompts],
        "output_lens": outputs,
        "errors": [""] * len(prompts),
        **milliseconds,
        **changes,
    }


class FakeServer:
    """Answers with given snapshots in turn; its processes use a CPU second between two looks."""

    def __init__(self, log: Path, snapshots: list[Snapshot]):
        self.log, self.snapshots, self.seconds, self.ended = log, snapshots, 0.0, False
        log.write_text("a line of the log\n")

    async def snapshot(self) -> Snapshot:
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def cpu_seconds(self) -> float:
        self.seconds += 1
        return self.seconds

    def check(self) -> None:
        if self.ended:
            raise ServerError("vllm serve ended")


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(load, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0)


def answer_with(monkeypatch, result: dict, seconds: float = 0.0) -> None:
    async def send(*_) -> dict:
        await asyncio.sleep(seconds)
        return result

    monkeypatch.setattr(load, "_send", send)


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_counts_from_its_own_start(tmp_path, monkeypatch, no_waiting, dtype):
    work = Load(4, 16, 8)
    before = Snapshot(preemptions=5, evictions=7, decision_seconds=1.0, compaction_seconds=1.0)
    busy = replace(before, running=3, physical_pages=100, logical_entries=2000)
    after = replace(before, preemptions=6, evictions=11, decision_seconds=1.25, compaction_seconds=1.15)
    answer_with(monkeypatch, client_result(work))
    server = FakeServer(tmp_path / "log", [before, busy, after])
    run = asyncio.run(drive(server, work, KV_BYTES, dtype))
    assert (run.wall, run.cpu, run.completed, run.input_tokens, run.output_tokens) == (2.0, 1.0, 4, 64, 32)
    assert (run.peak_running, run.preemptions, run.evictions) == (3, 1, 4)
    assert (run.physical_bytes, run.logical_bytes) == (100 * page_bytes(dtype), 2000 * entry_bytes(dtype))
    assert run.evict_share == pytest.approx(0.2)
    assert (run.tokens_per_second, run.tokens_per_cpu_second, run.requests_per_second) == (16, 32, 2)
    assert run.latency["e2e"] == {"mean": 0.04, "p50": 0.04, "p90": 0.04, "p99": 0.04}
    assert run.summary()["tokens_per_second"] == 16


def test_memory_is_read_at_its_peak():
    seen = [
        Snapshot(running=2, physical_pages=5, logical_entries=90),
        Snapshot(running=1, physical_pages=9, logical_entries=70),
    ]
    run = summarise(client_result(Load(1, 8, 2)), 1.0, Snapshot(), seen, Snapshot(), KV_BYTES, "float32")
    assert (run.peak_running, run.physical_bytes) == (2, 9 * page_bytes("float32"))
    assert run.logical_bytes == 70 * entry_bytes("float32")


def test_stock_tells_the_share_of_its_memory_only():
    seen = [Snapshot(kv_usage=0.5), Snapshot(kv_usage=0.25)]
    run = summarise(client_result(Load(1, 8, 2)), 1.0, Snapshot(), seen, Snapshot(), KV_BYTES, "float32")
    assert (run.physical_bytes, run.logical_bytes) == (KV_BYTES / 2, None)


def test_answers_of_one_token_have_no_time_between_tokens():
    result = client_result(Load(2, 8, 1))
    run = summarise(result, 1.0, Snapshot(), [Snapshot()], Snapshot(), KV_BYTES, "float32")
    assert set(run.latency) == {"ttft", "e2e"}


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
def test_no_figures_from_failed_requests(tmp_path, monkeypatch, no_waiting, changes, message):
    work = Load(2, 16, 8)
    answer_with(monkeypatch, client_result(work, **changes))
    with pytest.raises(ServerError, match=message):
        asyncio.run(drive(FakeServer(tmp_path / "log", [Snapshot()]), work, KV_BYTES, "float32"))


def test_no_waiting_for_a_server_that_ended(tmp_path, monkeypatch, no_waiting):
    fake = FakeServer(tmp_path / "log", [Snapshot()])
    fake.ended = True
    answer_with(monkeypatch, {}, seconds=60)
    with pytest.raises(ServerError, match="ended"):
        asyncio.run(drive(fake, Load(2, 16, 8), KV_BYTES, "float32"))


def test_metrics_of_all_ranks_are_added_up():
    snapshot = Snapshot.parse(METRICS)
    assert (snapshot.running, snapshot.physical_pages, snapshot.logical_entries) == (5, 40, 1200)
    assert (snapshot.decision_seconds, snapshot.compaction_seconds) == (0.75, 0.0)
    assert Snapshot.parse("").physical_pages is None


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
