"""Runs of the serving benchmarks with made-up figures."""

from benchmarks.harness.load import Run
from benchmarks.harness.soaking import SoakRun


def run_of(
    wall: float, tokens: int = 100, cpu: float = 1.0, peak: int = 4, preemptions: int = 0, live=None
) -> Run:
    seconds = {
        name: {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0} for name in ("ttft", "tpot", "itl", "e2e")
    }
    return Run(wall, cpu, 8, tokens, seconds, peak, 2.0**20, live, preemptions, 0, 0.0, 0.0)


def ours(wall: float, **changes) -> Run:
    return run_of(wall, live=2**19, **changes)


def without_port(command: list[str]) -> list[str]:
    """A server's command, whose port is another one each time."""
    port = command.index("--port") + 1
    return command[:port] + command[port + 1 :]


def missed(soak: SoakRun) -> set[str]:
    """The requirements that a soak has not met."""
    found = {target.name for target in soak.requirements if not target.met}
    assert soak.passed == (not found)
    return found
