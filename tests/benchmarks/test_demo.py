"""The demo's reading of /metrics and of the eviction log, and its tables; no server is started."""

import subprocess
import time

import psutil
import pytest

from benchmarks import demo
from benchmarks.demo import parse_arguments
from benchmarks.harness.answers import needle_question
from benchmarks.harness.load import page_bytes
from benchmarks.harness.server import end
from tests.benchmarks.runs import without_port
from vllm_kvevict.quality import checkpoint


@pytest.mark.parametrize("level, dtype", [("avx2", "float32"), ("avx512", "bfloat16")])
def test_servers_of_the_load(level, dtype, at_level):
    """They compute in what is fast, and differ in the eviction alone."""
    at_level(level)
    load = demo.scenario(parse_arguments([]))
    assert load.kv_bytes() == (4 * 72 + 4) * 4 * 4 * page_bytes(dtype)
    log = ["--kv-eviction-config.eviction_log", str(demo.EVICTIONS)]
    stock, evicting = (without_port(load.server(side, 1).command) for side in load.sides)
    assert evicting == [*stock, "--kv-eviction", "ada-snapkv", "--kv-budget", "0.2", *log]
    assert stock[stock.index("--dtype") + 1] == dtype


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ending_a_process_ends_its_group():
    shell = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        end(process)
    assert process.returncode is not None
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:  # nobody here can wait for another process's child
        time.sleep(0.01)
    assert not is_alive(child)


def test_the_question_lies_where_the_last_tokens_do_not_reach():
    (case,) = needle_question(2000)
    assert case.context.index(case.expected[0]) / len(case.context) < 0.5


def test_without_the_real_model_the_demo_says_so(monkeypatch, capsys):
    def unreachable(tell):
        tell("fetching")
        raise checkpoint.CheckpointError("it cannot be fetched")

    monkeypatch.setattr(checkpoint, "build", unreachable)
    assert demo.real_model() is None
    said = " ".join(capsys.readouterr().out.split())
    assert "it cannot be fetched. The question is put to the small model that comes with the project" in said
