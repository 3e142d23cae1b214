"""A ``vllm serve`` process with its log and its metrics."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

LOG_TAIL, LOG_WIDTH = 25, 300


class ServerError(RuntimeError):
    """The server did not start or ended; the message holds the end of its log."""


def metric(name: str, default: Any = 0) -> Any:
    """A field that is read from vLLM's metric of this name."""
    return field(default=default, metadata={"name": f"vllm:{name}"})


@dataclass(frozen=True)
class Snapshot:
    """What ``/metrics`` said at one moment; counters count from the start of the server.

    Attributes:
        running, waiting: requests.
        kv_usage: share of the KV memory in use.
        preemptions: a counter.
        draft_tokens, accepted_drafts: counters, 0 without speculative decoding.
        evictions: a counter, 0 without eviction.
        decision_seconds, compaction_seconds: sums over all evictions.
        physical_pages, logical_entries: held over all ranks, an entry is one token in one layer and KV head; None
            without eviction.
        cached_pages, uncompressed_pages: of these, what compressed and uncompressed prefixes in the cache hold.
        cached_prefixes: compressed ones.
        prefix_hits: prompt tokens that were found in the prefix cache, a counter.
    """

    running: int = metric("num_requests_running")
    waiting: int = metric("num_requests_waiting")
    kv_usage: float = metric("kv_cache_usage_perc")
    preemptions: int = metric("num_preemptions_total")
    draft_tokens: int = metric("spec_decode_num_draft_tokens_total")
    accepted_drafts: int = metric("spec_decode_num_accepted_tokens_total")
    evictions: int = metric("kv_eviction_evictions_total")
    decision_seconds: float = metric("kv_eviction_decision_seconds_sum")
    compaction_seconds: float = metric("kv_eviction_compaction_seconds_sum")
    physical_pages: int | None = metric("kv_eviction_physical_pages", None)
    cached_pages: int = metric("kv_eviction_cached_pages")
    uncompressed_pages: int = metric("kv_eviction_cached_uncompressed_pages")
    cached_prefixes: int = metric("kv_eviction_cached_entries")
    prefix_hits: int = metric("prefix_cache_hits_total")
    logical_entries: int | None = metric("kv_eviction_logical_kv_tokens", None)

    @property
    def request_pages(self) -> int:
        """Pages that requests hold for themselves, over all ranks."""
        return (self.physical_pages or 0) - self.cached_pages - self.uncompressed_pages

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Read the text of ``/metrics``; series that differ in labels are added up."""
        totals: Counter[str] = Counter()
        # The many buckets of histograms, which nobody needs here, would take most of the time.
        lines = [line for line in text.splitlines() if "_bucket{" not in line]
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                totals[sample.name] += sample.value  # type: ignore[assignment]
        found = {one: totals[one.metadata["name"]] for one in fields(cls) if one.metadata["name"] in totals}
        return cls(**{one.name: value if one.type is float else int(value) for one, value in found.items()})


class Server:
    """An asynchronous context manager: waits until the server answers, and ends all its processes.

    Args:
        model: folder of the model; requests call it by this name.
        log: file for everything the server writes.
        flags: further arguments of ``vllm serve``.
        env: environment variables on top of this process's.
        vllm: the command that serves; that of this process's Python environment by default.

    Attributes:
        patience: seconds that every server of this process may take to start; ``--start-patience`` sets it.
    """

    patience = 240.0

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: Sequence[str],
        env: Mapping[str, str],
        vllm: Path | None = None,
    ):
        self.model, self.log = str(model), log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        vllm = vllm or Path(sys.executable).with_name("vllm")
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self.command = [str(vllm), "serve", self.model, *address, *flags]
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen | None = None

    async def __aenter__(self) -> "Server":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # No connection is kept, since servers close those that are idle.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits)
        try:
            with self.log.open("w") as out:
                self._process = subprocess.Popen(
                    self.command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its workers join its process group and are ended with it
                )
            await self._answering()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._process is not None:
                end(self._process)
        finally:
            await self._client.aclose()

    def check(self) -> None:
        """Raise ServerError if the server has ended."""
        if self._process is None or self._process.poll() is not None:
            code = "" if self._process is None else f" with exit code {self._process.returncode}"
            raise ServerError(f"vllm serve ended{code}; the end of {self.log}:\n{tail(self.log)}")

    async def snapshot(self) -> Snapshot:
        """Read ``/metrics``."""
        response = await self._client.get("/metrics")
        response.raise_for_status()
        return Snapshot.parse(response.text)

    def cpu_seconds(self) -> float:
        """CPU seconds that all processes of the server have used so far."""
        self.check()
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (first, *first.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        self.check()
        assert self._process is not None
        os.killpg(self._process.pid, number)

    async def _answering(self) -> None:
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(httpx.TransportError):
                if (await self._client.get("/health", timeout=5)).status_code == 200:
                    return
            await asyncio.sleep(0.2)
        raise ServerError(
            f"vllm serve did not answer within {self.patience:g} s: on a busy machine raise --start-patience; "
            f"the end of {self.log}:\n{tail(self.log)}"
        )


@contextlib.contextmanager
def alone(server: Server, servers: Iterable[Server]) -> Iterator[None]:
    """Let all servers but one take no CPU time meanwhile: those without requests still do, on cores that they share."""
    stopped = [other for other in servers if other is not server]
    for other in stopped:
        other.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for other in stopped:
            other.signal(signal.SIGCONT)


def end(process: subprocess.Popen) -> None:
    """End a process that leads a process group, and whoever is left in the group."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)  # one that is paused would not hear of it
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    finally:  # also when a second Ctrl-C interrupts the waiting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def cpu_environment(threads: int | None, ranks: int) -> dict[str, str]:
    """Environment of a measured server whose ranks have so many OpenMP threads each; None: as vLLM places them.

    Ranks are bound to the first cores if that leaves a core to the client and the other processes. Otherwise the
    system places all threads, so that no rank is held on a core that it has to share while another one is free.
    """
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_KVEVICT_CHECK": "0",
        # A server that closes an idle connection while the client sends the next request on it makes that one fail.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    }
    if threads is None:
        return env
    cores = sorted(os.sched_getaffinity(0))
    bound = "nobind"
    if threads * ranks < len(cores):
        shares = [cores[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
        bound = "|".join(",".join(str(core) for core in share) for share in shares)
    return env | {"VLLM_CPU_OMP_THREADS_BIND": bound, "OMP_NUM_THREADS": str(threads)}


def run_benchmark(work: Coroutine[Any, Any, None]) -> int:
    """Run what starts servers; the exit code. Whatever ends it, also Ctrl-C and SIGTERM, ends the servers."""
    try:
        asyncio.run(_cancelled_by_sigterm(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; the servers were ended", file=sys.stderr)
        return 130
    except ServerError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except ExceptionGroup as group:  # of tasks
        if (failed := group.subgroup(ServerError)) is None:
            raise
        print(f"failed: {failed.exceptions[0]}", file=sys.stderr)
        return 1
    return 0


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def tail(path: Path, lines: int = LOG_TAIL) -> str:
    """The last lines of a file; vLLM prints its whole configuration in one."""
    return "\n".join(line[:LOG_WIDTH] for line in path.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
