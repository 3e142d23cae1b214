"""The demo's reading of /metrics and of the eviction log, and its tables; no server is started."""

import asyncio
import io
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import demo
from benchmarks.demo import dtype_note, parse_arguments, pool_bytes
from benchmarks.harness.answers import Asked, answers_table, kept, needle_question
from benchmarks.harness.documents import Answer, waits_table
from benchmarks.harness.kept import Growth, comparison_table, growth_table, kept_table
from benchmarks.harness.load import page_bytes
from benchmarks.harness.server import ServerError, Snapshot, end, tail
from tests.benchmarks.runs import run_of
from vllm_kvevict.engine.scheduler.evictions import EvictionLog
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.schedules.reports import EvictionRecord, read_evictions


def rendered(table) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


EVICTION = EvictionRecord("cmpl-7", 500, "snapkv", 390, 2000, 100, 128, [[100, 90], [120, 80]], 0.0, 0.0)


def test_evictions_as_the_engine_writes_them(tmp_path):
    path = tmp_path / "evictions.jsonl"
    EvictionLog(str(path)).write(EVICTION)
    (found,) = read_evictions(path)
    assert found == EVICTION
    text = rendered(kept_table(found))
    for part in ("KV head 1", "100", "80", "19.0%", "20.0%", "390 of 2,000"):
        assert part in text


@pytest.mark.parametrize("line", ["INFO a line of another log", "[]", '{"request": "cmpl-7"}'])
def test_another_file_is_no_eviction_log(tmp_path, line):
    path = tmp_path / "evictions.jsonl"
    EvictionLog(str(path)).write(EVICTION)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match="line 2: not a line of an eviction log"):
        list(read_evictions(path))


def test_comparison():
    stock = run_of(10.0, tokens=800, peak=4, preemptions=1)
    sides = {"stock": [replace(stock, physical_bytes=64 * 2**20, wall=wall) for wall in (10.0, 10.0)]}
    sides["ours"] = [replace(stock, physical_bytes=32 * 2**20, peak_running=8, wall=5.0)]
    text = rendered(comparison_table(sides, 64 * 2**20))
    for part in ("8 requests in the same 64 MiB", "16.0", "4.0", "2.0x", "80.0", "160.0", "50 %", "100 %"):
        assert part in text


@pytest.mark.parametrize("level, dtype", [("avx2", "float32"), ("avx512", "bfloat16")])
def test_servers_compute_in_what_is_fast(level, dtype, at_level, monkeypatch):
    at_level(level)
    started: list[list[str]] = []

    def no_server(model, log, flags, env):
        started.append(flags)
        raise ServerError("not started")

    monkeypatch.setattr(demo, "Server", no_server)
    for options, expected in (([], dtype), (["--dtype", "bfloat16"], "bfloat16")):
        with pytest.raises(ServerError, match="not started"):
            demo.comparison_server([], parse_arguments(options))
        flags = started[-1]
        assert flags[flags.index("--dtype") + 1] == expected
        memory = int(flags[flags.index("--kv-cache-memory-bytes") + 1])
        assert memory == pool_bytes(2304, 4, expected) == (4 * 72 + 1) * 4 * 4 * page_bytes(expected)


class IdleServer:
    """Stands in for a server; notes when it is paused."""

    def __init__(self, name: str, said: list[str]):
        self.name, self.said, self.paused = name, said, False

    async def __aenter__(self) -> "IdleServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.said.append(f"end {self.name}")

    def signal(self, number: int) -> None:
        self.paused = number == signal.SIGSTOP

    async def snapshot(self) -> Snapshot:
        return Snapshot(preemptions=len(self.said))


def test_sides_take_turns_alone(monkeypatch):
    said: list[str] = []
    servers = [IdleServer(name, said) for name in ("stock", "ours")]
    waiting = iter(servers)
    monkeypatch.setattr(demo, "comparison_server", lambda flags, arguments: next(waiting))

    async def drive(server, load, kv_bytes, dtype, seen):
        assert [other.paused for other in servers] == [other is not server for other in servers]
        assert len(load.prompts()[0][0]) == 2048 and kv_bytes == pool_bytes(2304, 4, dtype)
        seen(Snapshot(running=3, output_tokens=7))
        said.append(f"{server.name} {load.seed}")
        return run_of(1.0)

    async def then(server):
        said.append(f"then {server.name}")

    monkeypatch.setattr(demo, "drive", drive)
    rounds = asyncio.run(demo.compare({"stock": [], "ours": ["--flag"]}, parse_arguments([]), then))
    assert said == ["stock 0", "ours 0", "stock 1", "ours 1", "then ours", "end ours", "end stock"]
    assert list(rounds) == ["stock", "ours"] and len(rounds["ours"]) == 2


def test_another_dtype_than_the_models_is_explained(at_level):
    at_level("avx2")
    assert dtype_note("bfloat16") is None
    note = dtype_note("float32")
    assert note and "float32" in note and "avx2" in note
    at_level("avx512")
    note = dtype_note("float32")
    assert note and "as --dtype says" in note


def test_ending_a_process_ends_its_group(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    end(process)
    assert process.returncode is not None
    log = tmp_path / "log"
    log.write_text("\n".join(str(number) for number in range(100)))
    assert tail(log, 3) == "97\n98\n99"


def test_the_question_lies_where_the_last_tokens_do_not_reach():
    (case,) = needle_question(2000)
    assert case.context.index(case.expected[0]) / len(case.context) < 0.5


def test_answers_are_marked():
    columns = kept("snapkv", 0.2)
    assert [column.policy for column in columns] == ["full", "snapkv", "streaming-llm"]
    (case,) = needle_question(500)
    wrong, right = ["a b c", "", "d"], [" ".join(case.expected), "a b c", ""]
    shown = [
        rendered(answers_table("a model", columns, [Asked(case, replies)])) for replies in (wrong, right)
    ]
    assert [table.count("wrong") for table in shown] == [3, 2]


def test_waits_of_questions():
    text = rendered(waits_table(2032, [Answer(1.25, [1], 0), Answer(0.05, [1], 2032)]))
    for part in ("2 questions about one document of 2,032 tokens", "1.250 s", "0.050 s", "2,032 "):
        assert part in text


def test_the_table_shows_what_an_answer_holds():
    run = replace(run_of(4.0, tokens=640), input_tokens=512)
    found = {
        "kept whole": Growth(run, [64, 128, 192]),
        "bounded": Growth(replace(run, wall=2.0, answer_evictions=5), [64, 96, 80]),
        "unseen": Growth(run, []),
    }
    text = rendered(growth_table(found, 2**20))
    for part in ("640 tokens to a prompt of 512", "192.00", "96.00", "80.00", "160.0", "320.0", " 5 "):
        assert part in text
    assert text.count("not seen") == 2


def test_without_the_real_model_the_demo_says_so(monkeypatch, capsys):
    def unreachable(tell):
        tell("fetching")
        raise checkpoint.CheckpointError("it cannot be fetched")

    monkeypatch.setattr(checkpoint, "build", unreachable)
    assert demo.real_model() is None
    said = " ".join(capsys.readouterr().out.split())
    assert "it cannot be fetched. The question is put to the small model that comes with the project" in said
