"""The entrypoint with a stand-in for vLLM, and the real one: flags, quoting, signals, health check."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docker.conftest import ENTRYPOINT
from tests.engine.support.serving import ROOT

HEALTHCHECK = ROOT / "docker/healthcheck.py"
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
offline = os.environ.get("HF_HUB_OFFLINE")
call = {{"pid": os.getpid(), "words": sys.argv[1:], "offline": offline, "umask": os.umask(0)}}
print(json.dumps(call), flush=True)
if "--wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("ready", flush=True)
    time.sleep(60)
sys.exit(3)
"""
ADDRESS = ["--host", "0.0.0.0", "--port", "8000"]
CONFIG = '{"window": 16, "x": "a \'b\' $HOME *"}'
WORDS = ["--served-model-name", "two words", "--x", "", "$(touch /tmp/no)", "*"]
"""What a shell would change."""


@pytest.fixture
def start(tmp_path: Path):
    """Starts the entrypoint in an environment of nothing but PATH, a home and what is given."""
    stand_in = tmp_path / "bin/vllm"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        path = f"{stand_in.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
        return subprocess.Popen(
            [str(ENTRYPOINT), *arguments],
            env={"PATH": path, "HOME": str(tmp_path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def called(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=20)
    assert process.returncode == 3, err  # the stand-in's own status
    return json.loads(out)


@pytest.mark.parametrize(
    "environment, arguments, flags",
    [
        ({}, [], ADDRESS),
        (
            {"KV_EVICTION": "ada-snapkv", "KV_BUDGET": "0.2"},
            [],
            [*ADDRESS, "--kv-eviction", "ada-snapkv", "--kv-budget", "0.2"],
        ),
        ({"KV_EVICTION": "", "KV_BUDGET": "", "KV_EVICTION_CONFIG": "", "PORT": ""}, [], ADDRESS),
        (
            {"KV_EVICTION": "take", "KV_EVICTION_CONFIG": CONFIG},
            ["--max-model-len", "2048"],
            [*ADDRESS, "--kv-eviction", "take", "--kv-eviction-config", CONFIG, "--max-model-len", "2048"],
        ),
        ({}, WORDS, [*ADDRESS, *WORDS]),
    ],
)
def test_environment_becomes_flags_and_arguments_follow(start, environment, arguments, flags):
    words = called(start(*arguments, MODEL="org/name", **environment))["words"]
    assert words == ["serve", "org/name", *flags]


def test_folders_with_spaces_are_one_word_and_switch_the_hub_off(start, tmp_path):
    folder = tmp_path / "my model; ls"
    folder.mkdir()
    call = called(start(MODEL=str(folder)))
    assert call["words"][:2] == ["serve", str(folder)] and call["offline"] == "1"
    assert called(start(MODEL=str(folder), HF_HUB_OFFLINE="0"))["offline"] == "0"
    assert called(start(MODEL="org/name"))["offline"] is None


def test_the_group_may_replace_what_is_compiled(start):
    assert called(start(MODEL="org/name"))["umask"] == 0o002


@pytest.mark.parametrize("environment", [{}, {"MODEL": ""}, {"MODEL": "/models/absent"}])
def test_a_model_that_cannot_be_there_ends_in_one_sentence(start, environment):
    process = start(**environment)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 64 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("entrypoint: MODEL")


def test_signals_reach_vllm_and_its_status_is_the_containers(start):
    process = start("--wait", MODEL="org/name")
    first = json.loads(process.stdout.readline())
    assert first["pid"] == process.pid
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 7


def health(port: int) -> subprocess.CompletedProcess[str]:
    # A proxy that is meant for the world outside must not be asked for the server in this container.
    env = {"PATH": os.environ["PATH"], "PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, str(HEALTHCHECK)], env=env, capture_output=True, text=True, timeout=20
    )


@pytest.mark.engine
def test_the_real_server_is_healthy_until_it_is_told_to_end(evicted):
    assert evicted.page
    process, port = evicted.server.process, evicted.server.port
    command = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    assert "serve" in command and "--kv-eviction" in command  # exec: no shell stands between
    run = health(port)
    assert run.returncode == 0, run.stderr
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert health(port).returncode != 0
    # The engine and its workers are in the group that the server leads: nobody may be left there.
    deadline = time.monotonic() + 20
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(process.pid)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
