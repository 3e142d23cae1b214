"""What is said of the contract after the tests: one line for each seam that does not hold."""

import pytest

from tests.contract import source

FOLDER = "tests/contract/"


def report(terminalreporter: pytest.TerminalReporter) -> None:
    """Print it, if any of its tests ran."""
    stats = terminalreporter.stats
    mine = {
        kind: [x for x in stats.get(kind, []) if FOLDER in x.nodeid] for kind in ("passed", "failed", "error")
    }
    if not any(mine.values()):
        return
    failed = mine["failed"] + mine["error"]
    total = len(failed) + len(mine["passed"])
    terminalreporter.section("contract")
    for check in failed:
        name = check.nodeid.partition(FOLDER)[2]
        terminalreporter.write_line(f"{name}: {check.longreprtext.strip().splitlines()[-1]}")
    found = f"vLLM {source.version()} ({source.root()})"
    terminalreporter.write_line(
        f"{found}: {len(failed)} of {total} checks fail" if failed else f"{found}: all hold"
    )
