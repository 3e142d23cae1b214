"""Options, names of records, and commands that have moved; nothing is measured."""

import asyncio
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.harness import measure, server
from benchmarks.harness.load import NUMBER_BYTES
from benchmarks.harness.measure import full_name, record, record_name
from benchmarks.micro import loop
from benchmarks.micro.__main__ import NAMES

FOLDER = measure.RESULTS.parent
COMMANDS = {"demo", "throughput", "latency", "prefix", "chat", "kvpress", "soak", "report", "real_model"}
OF_ALL = {"soak": ["--requests", "1"]}
"""What a command cannot do without."""


def parse(name: str, *words: str):
    """A command's options."""
    if name in {*NAMES, "kvpress"}:
        module = f"micro.{name}" if name in NAMES else "kvpress.__main__"
        return loop.parse(name, importlib.import_module(f"benchmarks.{module}"), words)
    module = importlib.import_module(f"benchmarks.{name}")
    found = module.parse_arguments([*OF_ALL.get(name, []), *words])
    return found[0] if isinstance(found, tuple) else found


def test_these_are_all_commands():
    names = {path.stem for path in FOLDER.glob("[!_]*.py")}
    assert names | {"kvpress"} == COMMANDS
    assert set(NAMES) == {path.stem for path in (FOLDER / "micro").glob("*.py")} & set(NAMES)


@pytest.mark.parametrize(
    "name",
    sorted({*NAMES, "throughput", "latency", "prefix", "chat", "kvpress", "demo"} - {"ledger", "frontend"}),
)
def test_what_compares_speeds_takes_a_dtype(name, at_level, capsys):
    for level, expected in (("avx512", "bfloat16"), ("avx2", "float32"), ("generic", "bfloat16")):
        at_level(level)
        assert parse(name).dtype == expected
    for dtype in NUMBER_BYTES:
        assert parse(name, "--dtype", dtype).dtype == dtype
    with pytest.raises(SystemExit):
        parse(name, "--dtype", "float16")
    assert "--dtype" in capsys.readouterr().err


@pytest.mark.parametrize("case", Path(__file__).with_name("wrong_options.txt").read_text().splitlines())
def test_wrong_options_are_named(case, capsys):
    line, _, message = case.partition(": ")
    name, *words = line.split()
    with pytest.raises(SystemExit):
        parse(name, *words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_names_of_records_keep_kinds_apart(at_level, monkeypatch):
    at_level("avx512")
    assert record_name("decode", "bfloat16") == "decode"
    assert record_name("decode", "float32") == "decode-avx512-float32"
    at_level("avx512", converts=True)
    assert record_name("decode", "bfloat16") == "decode-avx512-converted-bfloat16"
    at_level("avx2")
    assert record_name("decode", "bfloat16") == full_name("decode", "bfloat16") == "decode-avx2-bfloat16"
    monkeypatch.setenv("VLLM_KVEVICT_CPU_LEVEL", "avx2")
    assert record_name("decode", "float32") == "decode-avx2-forced-float32"
    assert record("decode", {})["command"].startswith(
        "VLLM_KVEVICT_CPU_LEVEL=avx2 python -m benchmarks.decode"
    )


@pytest.mark.parametrize("name", sorted(COMMANDS - {"kvpress", "report"}))
def test_every_command_hears_how_long_a_server_may_take(name, monkeypatch):
    monkeypatch.setattr(server.Server, "patience", server.Server.patience)
    assert parse(name).start_patience == 240
    parse(name, "--start-patience", "0.5")
    assert server.Server.patience == 0.5


def test_a_server_that_does_not_start_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(server.Server, "patience", 0.1)

    async def start():
        slow = server.Server(tmp_path, tmp_path / "log", [], {})
        slow.command = ["sleep", "60"]
        async with slow:
            pass

    with pytest.raises(server.ServerError, match=r"not answer within 0\.1 s: .* raise --start-patience"):
        asyncio.run(start())


def test_a_command_that_has_moved_says_where_it_is():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.hostile", "--rounds", "3"], capture_output=True, text=True
    )
    sentence = "python -m benchmarks.hostile is now: python -m benchmarks.soak --hostile\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    for old, new in benchmarks.MOVED.items():
        command, *name = new.split()
        with pytest.raises(SystemExit, match=re.escape(f"is now: python -m benchmarks.{new}")):
            benchmarks.refuse_moved(["python", "-m", f"benchmarks.{old}", "--rounds", "3"])
        assert command in COMMANDS or name[0] in NAMES
    benchmarks.refuse_moved(["python", "-m", "benchmarks.soak", "--hostile"])
    benchmarks.refuse_moved(["python", "-m", "hostile"])


def test_every_command_that_a_record_names_is_there_or_says_where():
    named = [json.loads(path.read_text())["command"].split() for path in measure.RESULTS.glob("*.json")]
    modules = [words[words.index("-m") + 1] for words in named]
    known = COMMANDS | set(benchmarks.MOVED) | {"micro"}
    assert {name.removeprefix("benchmarks.") for name in modules if name.startswith("benchmarks.")} <= known
