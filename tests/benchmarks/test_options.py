"""Options that benchmarks share: dtypes, the bytes and names of records that follow from them, and patience."""

import asyncio
import importlib
import re

import pytest

from benchmarks.demo import pool_bytes
from benchmarks.harness import measure, server
from benchmarks.harness.load import NUMBER_BYTES, entry_bytes, page_bytes
from benchmarks.harness.measure import full_name, record, record_name
from benchmarks.harness.scenarios import LAYERS, SCENARIOS, token_bytes

FOLDER = measure.RESULTS.parent
MODULES = sorted(
    {path.stem for path in FOLDER.glob("*.py") if "def parse_arguments" in path.read_text()}
    # These compare no speeds of sides, their servers always compute in fp32; and the front end computes nothing.
    - {"soak", "hostile", "real_model", "frontend"}
    | {"kvpress.__main__"}
)


def parse(module: str, *options: str):
    """A benchmark's options."""
    found = importlib.import_module(f"benchmarks.{module}").parse_arguments(options)
    return found[0] if isinstance(found, tuple) else found


def test_all_benchmarks_are_found():
    serving = {"throughput", "latency", "kvpress.__main__", "demo"}
    engines = {"breakdown", "decode", "eviction", "prefill", "waste"}
    assert set(MODULES) >= serving | engines | {"attention", "micro"}


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_takes_a_dtype(module, at_level, capsys):
    for level, expected in (("avx512", "bfloat16"), ("avx2", "float32"), ("generic", "bfloat16")):
        at_level(level)
        assert parse(module).dtype == expected
    for dtype in NUMBER_BYTES:
        assert parse(module, "--dtype", dtype).dtype == dtype
    with pytest.raises(SystemExit):
        parse(module, "--dtype", "float16")
    assert "--dtype" in capsys.readouterr().err


def test_the_help_says_what_is_fast_here(at_level, capsys):
    at_level("avx2")
    with pytest.raises(SystemExit):
        parse("decode", "--help")
    assert "this processor computes fast, here float32" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "size",
    [entry_bytes, page_bytes, token_bytes, lambda dtype: pool_bytes(2048, 256, dtype)],
)
def test_bytes_follow_the_dtype(size):
    assert size("float32") == 2 * size("bfloat16") > 0


def test_bytes_of_a_token():
    assert entry_bytes("bfloat16") == 2 * 64 * 2
    assert token_bytes("float32", 16) * LAYERS == token_bytes("float32") * 16


def test_names_of_records_keep_kinds_apart(at_level):
    at_level("avx512")
    assert record_name("decode", "bfloat16") == "decode"
    assert record_name("decode", "float32") == "decode-avx512-float32"
    at_level("avx512", converts=True)
    assert record_name("decode", "bfloat16") == "decode-avx512-converted-bfloat16"
    assert record_name("decode", "float32") == "decode-avx512-float32"
    at_level("avx2")
    assert record_name("decode", "bfloat16") == full_name("decode", "bfloat16") == "decode-avx2-bfloat16"


def test_records_of_a_level_that_is_forced_say_so(at_level, monkeypatch):
    at_level("avx2")
    monkeypatch.setenv("VLLM_KVEVICT_CPU_LEVEL", "avx2")
    assert record_name("decode", "float32") == full_name("decode", "float32") == "decode-avx2-forced-float32"
    assert record("decode", {})["command"].startswith(
        "VLLM_KVEVICT_CPU_LEVEL=avx2 python -m benchmarks.decode"
    )


def test_a_scenario_changes_with_the_option():
    (chosen,) = (
        importlib.import_module("benchmarks.throughput").parse_arguments(["--dtype", "float32"])[1].values()
    )
    usual = SCENARIOS["pool-bound"]
    assert chosen.dtype == "float32" and chosen.kv_bytes() == 2 * usual.kv_bytes()


STARTING = {
    path.stem: ["--requests", "1"] if path.stem == "soak" else []
    for path in FOLDER.glob("*.py")
    if re.search(r"\bServer\(|\bmake_server\b|\brun_benchmark\b", path.read_text())
}
"""Benchmarks that start servers, with the options that they cannot do without."""


def test_benchmarks_that_start_servers_are_found():
    assert set(STARTING) >= {
        "throughput",
        "latency",
        "prefix",
        "chat",
        "speculation",
        "demo",
        "hostile",
        "soak",
    }


@pytest.mark.parametrize("module", STARTING)
def test_a_server_that_does_not_start_in_time(module, monkeypatch, tmp_path):
    """The sentence names the option, and the option is heard."""
    monkeypatch.setattr(server.Server, "patience", server.Server.patience)
    assert parse(module, *STARTING[module]).start_patience == 240
    parse(module, *STARTING[module], "--start-patience", "0.1")

    async def start():
        slow = server.Server(tmp_path, tmp_path / "log", [], {})
        slow.command = ["sleep", "60"]
        async with slow:
            pass

    with pytest.raises(server.ServerError, match=r"not answer within 0\.1 s: .* raise --start-patience"):
        asyncio.run(start())
