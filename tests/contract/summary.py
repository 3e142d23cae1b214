"""What is said of the contract after the tests: one line for each seam that does not hold."""

import re

import pytest

from tests.contract import source

FOLDER = "tests/contract/"


def version() -> str:
    """The version of vLLM whose source is read."""
    file = source.module_file("vllm._version")
    found = re.search(r"^__version__ = .*?['\"](.+?)['\"]", file.read_text(), re.MULTILINE) if file else None
    return found.group(1) if found else "of unknown version"


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
    found = f"vLLM {version()} ({source.root()})"
    terminalreporter.write_line(
        f"{found}: {len(failed)} of {total} checks fail" if failed else f"{found}: all hold"
    )
