"""How two runs of the same tests ended: what was written by the witness is read, and the runs are compared."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPLETE = (0, 1)
"""Exit codes of pytest when it ran all tests."""


@dataclass
class Run:
    """One run of the tests.

    Attributes:
        tests: how each ended, by its id.
        loaded: modules of our package, at the beginning and at the end.
        hooked: whether vLLM's engine arguments had our fields then.
        ended: pytest's exit code, None if it did not come to its end.
    """

    tests: dict[str, str] = field(default_factory=dict)
    loaded: list[int] = field(default_factory=list)
    hooked: list[bool] = field(default_factory=list)
    ended: int | None = None

    def summary(self) -> str:
        counts = Counter(self.tests.values())
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "none"


def read(path: Path) -> Run:
    """What the witness wrote, which may be nothing."""
    run = Run()
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        if "test" in told:
            # A test that passed may still fail when its fixtures end; that comes later, and counts.
            run.tests[told["test"]] = told["outcome"]
        elif "ended" in told:
            run.ended = told["ended"]
        else:
            run.loaded.append(told["modules"])
            run.hooked.append(told["hooked"])
    return run


def differences(ours: Run, stock: Run) -> Iterator[str]:
    """A line for each test that did not end alike."""
    for test in sorted(ours.tests.keys() | stock.tests.keys()):
        one, other = (run.tests.get(test, "not run") for run in (ours, stock))
        if one != other:
            yield f"{test}: {one} with the package, {other} without"


def faults(ours: Run, stock: Run, least: int) -> Iterator[str]:
    """Why the two runs say nothing, a sentence each.

    Args:
        ours: the run with the package.
        stock: the run without.
        least: tests that must have passed without the package.
    """
    for run, name in ((ours, "with"), (stock, "without")):
        if run.ended not in COMPLETE:
            how = "did not end" if run.ended is None else f"ended with pytest's exit code {run.ended}"
            yield f"the run {name} the package {how}"
    # Before the first test as well as after the last.
    if len(ours.loaded) < 2 or not all(ours.loaded) or not all(ours.hooked):
        yield "the package was not loaded in the run with it"
    if any(stock.loaded) or any(stock.hooked):
        yield "the package was loaded in the run without it"
    passed = sum(outcome == "passed" for outcome in stock.tests.values())
    if passed < least:
        yield f"only {passed} tests passed without the package, of at least {least}: too few to compare"


def report(ours: Run, stock: Run, least: int) -> tuple[list[str], bool]:
    """The lines to print, and whether all tests ended alike."""
    different, wrong = list(differences(ours, stock)), list(faults(ours, stock, least))
    lines = [
        f"with the package ({_loaded(ours)}): {len(ours.tests)} tests, {ours.summary()}",
        f"without it ({_loaded(stock)}): {len(stock.tests)} tests, {stock.summary()}",
        *different,
        *(f"error: {sentence}" for sentence in wrong),
    ]
    alike = not different and not wrong
    lines.append("all ended alike" if alike else f"{len(different)} ended differently")
    return lines, alike


def _loaded(run: Run) -> str:
    return f"{max(run.loaded, default=0)} of its modules loaded"
