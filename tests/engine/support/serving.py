"""Commands and servers as users run them, for tests: processes of their own, always ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.server import Snapshot, end
from tests.engine.support.forks import Forked, fork

ROOT = Path(__file__).resolve().parents[3]
VLLM = str(Path(sys.executable).with_name("vllm"))

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads would spin on cores that other processes need
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}
# What the tests' own engines need is not what a user's process has.
for name in (
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_KVEVICT_CHECK",
    "VLLM_LOGGING_LEVEL",
    "VLLM_WORKER_MULTIPROC_METHOD",
):
    ENVIRONMENT.pop(name, None)


def command(*words: str | Path, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env=ENVIRONMENT | env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def forked_command(*words: str | Path, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``vllm-kvevict`` or ``vllm`` to its end, forked from a process that has imported vLLM."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        forked = fork([str(word) for word in words], ENVIRONMENT | env, output, errors)
        try:
            code = forked.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(forked.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


ON_REQUEST = ("--dtype", "float32", "--enforce-eager", "--kv-eviction", "full")
"""Flags of a small server that evicts what requests ask for, and nothing else."""


def log_evictions(log: Path) -> list[str]:
    """Flags that let a server write its evictions to a file beside its log."""
    return ["--kv-eviction-config.eviction_log", str(_evictions_beside(log))]


def _evictions_beside(log: Path) -> Path:
    return log.with_suffix(".evictions.jsonl")


class Server:
    """A ``vllm serve`` process with its log; use as a context manager."""

    COMMAND: tuple[str, ...] = ("serve",)

    def __init__(self, model: Path, log: Path, *flags: str, env: Mapping[str, str] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        self.log_path = log
        address = ["--port", str(self.port), "--host", "127.0.0.1"]
        self.arguments = [VLLM, *self.COMMAND, self.model, *address, *flags]
        self.environment = ENVIRONMENT | dict(env or {})

    def __enter__(self) -> "Server":
        self.process = self._start()
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> "subprocess.Popen[bytes] | Forked":
        with self.log_path.open("w") as log:
            return subprocess.Popen(
                self.arguments,
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be ended with it
            )

    def __exit__(self, *_: object) -> None:
        end(self.process)  # type: ignore[arg-type]

    def _wait(self, patience: float = 300) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log[-5000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"the server did not come up:\n{self.log[-5000:]}")

    @property
    def log(self) -> str:
        """Everything written to stdout and stderr so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def evictions(self) -> list[dict[str, Any]]:
        """What the server, if it was started with ``log_evictions(log)``, wrote of its evictions so far."""
        return [json.loads(line) for line in _evictions_beside(self.log_path).read_text().splitlines()]

    def snapshot(self) -> Snapshot:
        """What ``/metrics`` says in all."""
        return Snapshot.parse(httpx.get(f"{self.url}/metrics", timeout=60).text)

    def metrics(self) -> dict[str, float]:
        """Our numbers at ``/metrics``, of both phases together: names without the prefix, with the labels that vary."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("vllm:kv_eviction_"):
                series, _, value = line.removeprefix("vllm:kv_eviction_").rpartition(" ")
                name, _, labels = series.partition("{")
                kept = [
                    label
                    for label in labels.rstrip("}").split(",")
                    if label.startswith(("policy=", "rank=", "reason=", "le="))
                ]
                key = name + ("{" + ",".join(kept) + "}" if kept else "")
                found[key] = found.get(key, 0.0) + float(value)
        return found


class ForkedServer(Server):
    """A server that is up in a few seconds: what it imports was imported once for all of them. Its log shows no more
    than warnings of what vLLM does before it reads its arguments. Processes that users start are :class:`Server`."""

    def _start(self) -> Forked:
        return fork(["vllm", *self.arguments[1:]], self.environment, self.log_path)


class RenderServer(ForkedServer):
    """A server without an engine, which only renders."""

    COMMAND = ("launch", "render")
