"""What every soak shares: a server under load, what it must not do as figures with bounds, and the record."""

import argparse
import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.harness.documents import http_client
from benchmarks.harness.measure import RESULTS, record, save, warn_if_busy
from benchmarks.harness.models import make_model
from benchmarks.harness.scenarios import Target, show_targets
from benchmarks.harness.server import Server, Snapshot, cpu_environment
from benchmarks.harness.tables import table
from benchmarks.harness.traffic import BROKEN, EXPECTED, HUNG, LEFT, Outcome

FOLDER = Path(__file__).parents[1] / "out" / "soak"
"""For models and logs, and for records that are not the project's."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
"""GiB that vLLM may take, of which the servers' blocks are far less; and what makes it offer to change weights and to
reset its cache."""
PATIENCE = 180.0
"""Seconds that the server has to come to rest."""
KEPT_FAILURES = 20


def tracebacks(log: str) -> int:
    """How many a server's log has, apart from those of bodies that FastAPI refuses.

    A server that offers to reset its cache logs these, though it answers them as any other does.
    """
    parts = log.split("Traceback (most recent call last)")[1:]
    return sum("JSONDecodeError" not in part and "RequestValidationError" not in part for part in parts)


def none(what: str, found: float) -> Target:
    """A requirement that there is nothing of a kind."""
    return Target(what, found, 0, at_most=True)


async def reset(client: httpx.AsyncClient, hard: bool = False) -> None:
    """Empty the server's caches; hard: also preempt what runs."""
    params = {"reset_running_requests": str(hard).lower()}
    (await client.post("/reset_prefix_cache", params=params, timeout=60)).raise_for_status()


async def until_idle(server: Server, empty: bool = False) -> Snapshot:
    """The server once nothing runs and no request holds anything, or after too long a time.

    Args:
        empty: wait until nothing is cached, either.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = await server.snapshot()
        held = seen.physical_pages if empty else seen.request_pages
        if not (seen.running or seen.waiting or held) or time.monotonic() > deadline:
            return seen
        await asyncio.sleep(0.2)


class SoakRun(ABC):
    """One run of a load against a server, held against requirements.

    Args:
        name: of the record, which is the project's unless the arguments have another one.
        arguments: of the soak.
        flags: of the server, but for its ranks.

    Attributes:
        good: what may become of a request.
        sizes: of the model.
        ranks: of the server.
        tally: how often what became of a request of which kind.
        failures: details of the first requests that went wrong.
        server_errors: answers 5xx.
        idle, empty: the server after the load, and after a reset of its cache.
        requirements: known at the end.
    """

    good: Sequence[str] = (EXPECTED, LEFT)

    def __init__(self, name: str, arguments: argparse.Namespace, flags: Sequence[str]):
        self.name, self.arguments = name, arguments
        tensor, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        self.ranks: int = tensor * stages
        self.flags = [*flags, "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages)]
        self.console = Console(width=110)
        self.tally: Counter[tuple[str, str]] = Counter()
        self.failures: list[Any] = []
        self.server_errors = 0
        self.idle = self.empty = Snapshot()
        self.sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "max_len": 512}
        self.requirements: list[Target] = []

    @property
    def passed(self) -> bool:
        return bool(self.requirements) and all(requirement.met for requirement in self.requirements)

    def numbers(self) -> Iterator[int]:
        """Of the requests, as long as there are to be more."""
        start, minutes, requests = time.monotonic(), self.arguments.minutes, self.arguments.requests
        for number in itertools.count():
            over = number >= requests if minutes is None else time.monotonic() - start >= 60 * minutes
            if over:
                return
            yield number

    def note(self, kind: str, outcome: Outcome, result: str | None = None, **asked: Any) -> None:
        """Count what became of a request.

        Args:
            kind: of the request.
            result: what the outcome means here, where that is something else than it says.
            asked: more of the request, for the record of what went wrong.
        """
        result = result or outcome.result
        self.tally[kind, result] += 1
        self.server_errors += outcome.status is not None and outcome.status >= 500
        if result not in self.good and len(self.failures) < KEPT_FAILURES:
            self.failures.append({"kind": kind, **asked, **asdict(outcome), "result": result})

    def count(self, result: str, *kinds: str) -> int:
        """Requests, of these kinds or of all, of which this became."""
        return sum(
            times for (kind, of), times in self.tally.items() if of == result and (not kinds or kind in kinds)
        )

    async def settle(self, server: Server, client: httpx.AsyncClient) -> None:
        """See what the server holds once it is idle, and then once its cache is empty."""
        self.idle = await until_idle(server)
        await reset(client)
        self.empty = await until_idle(server, empty=True)

    def shared_requirements(self, tracebacks: int) -> list[Target]:
        """What holds under every load; tracebacks are those in the server's log."""
        return [
            none("requests that hung", self.count(HUNG)),
            none("connections that broke off", self.count(BROKEN)),
            none("answers 5xx", self.server_errors),
            none("tracebacks in the server's log", tracebacks),
            none("requests running or waiting when idle", self.idle.running + self.idle.waiting),
            none("pages held when idle", self.idle.request_pages),
            none("pages cached after a reset", self.empty.physical_pages or 0),
        ]

    def counted(self) -> dict[str, int]:
        """Requests by kind and result."""
        return {f"{kind}: {result}": times for (kind, result), times in sorted(self.tally.items())}

    def model(self) -> Path:
        """That the server starts with."""
        return make_model(FOLDER / f"model-{self.name}", **self.sizes)

    @abstractmethod
    async def load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Everything that is asked of the server."""

    @abstractmethod
    def judge(self, tracebacks: int) -> None:
        """Set the requirements; tracebacks are those in the server's log."""

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """For the record, besides what every soak writes."""

    def rows(self) -> Mapping[str, Any]:
        """For the table, besides the tally."""
        return {}

    async def run(self) -> None:
        """Everything: start, load, verdict, table, record."""
        load_average = warn_if_busy(self.console)
        env = cpu_environment(1, self.ranks) | ENVIRONMENT
        env["VLLM_KVEVICT_CHECK"] = str(int(self.arguments.check))
        server = Server(self.model(), FOLDER / f"{self.name}.log", self.flags, env)
        self.console.print(f"starting vllm serve {' '.join(self.flags)}", highlight=False)
        begin = time.monotonic()
        async with server, http_client(server) as client:
            await self.load(server, client)
            server.check()
            log = server.log.read_text(errors="replace")  # the end of a server brings lines of its own
        self.judge(tracebacks(log))
        self._report(time.monotonic() - begin, load_average)

    def _report(self, seconds: float, load_average: float) -> None:
        shown = table(f"{self.tally.total()} requests in {seconds:.0f} s", [""], [""])
        for name, value in {**self.counted(), **self.rows()}.items():
            shown.add_row(name, f"{value:g}" if isinstance(value, float) else str(value))
        self.console.print(shown)
        content = {
            "flags": self.flags,
            "check": self.arguments.check,
            "load_average_at_start": load_average,
            "seconds": seconds,
            "requests": self.tally.total(),
            "tally": self.counted(),
            **self.results(),
            "targets": show_targets(self.console, self.requirements),
            "failures": self.failures,
        }
        folder = RESULTS if self.arguments.name is None else FOLDER
        path = save(self.arguments.name or self.name, record("soak", content), folder)
        self.console.print(f"written to {path}")
        for failure in self.failures[:5]:
            self.console.print(failure, style="red", highlight=False)
        if not self.passed:
            self.console.print(f"failed; the server's log is in {FOLDER}", highlight=False)
