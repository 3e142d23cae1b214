"""A plugin for pytest in a run of vLLM's tests: writes how each test ended, and whether our package was loaded.

It is imported by its own name, since `tests` means vLLM's tests there.
"""

import gc
import json
import os
import sys
from typing import Any

import pytest

OUT = "KVEVICT_WITNESS"
"""The environment variable that names the file: JSON, a line for each thing."""
_unfreeze = gc.unfreeze


def _tell(**what: Any) -> None:
    # At once: whoever ends the process leaves what was written before.
    with open(os.environ[OUT], "a") as file:
        print(json.dumps(what), file=file)


def _tell_what_is_loaded() -> None:
    """Our modules, and whether vLLM's engine arguments have our fields."""
    from vllm.engine.arg_utils import EngineArgs

    modules = [name for name in sys.modules if name.split(".")[0] == "vllm_kvevict"]
    _tell(modules=len(modules), hooked="kv_eviction" in EngineArgs.__dataclass_fields__)


def pytest_configure() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as vLLM does in each of its processes
    _tell_what_is_loaded()


def pytest_collection_finish() -> None:
    # vLLM's fixtures collect garbage after each test. To look through all that was imported takes longer than most of
    # the tests, so it is left out, and stays so: the fixtures would undo that.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    gc.unfreeze = _unfreeze
    gc.unfreeze()  # libraries that are unloaded count what is left of theirs


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(test=report.nodeid, outcome="error")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if outcome := _outcome(report):
        _tell(test=report.nodeid, outcome=outcome)


def _outcome(report: pytest.TestReport) -> str | None:
    """How a test ended, as far as one of its three parts decides that."""
    if report.failed:
        return "failed" if report.when == "call" else "error"
    expected = hasattr(report, "wasxfail")
    if report.skipped:
        return "xfailed" if expected else "skipped"
    return ("xpassed" if expected else "passed") if report.when == "call" else None


def pytest_sessionfinish(exitstatus: int) -> None:
    _tell_what_is_loaded()
    _tell(ended=int(exitstatus))
