"""Prints which files some requests pass, in order: ``python -m tests.engine.support.walks``.

The requests are those of the walks in docs/ARCHITECTURE.md; a file is passed when a function of it runs.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tests.conftest
import tests.engine.conftest  # noqa: F401  (both set what engines read from the environment)
from benchmarks.harness.models import make_model
from tests.engine.support.running import Ask, engine, run
from tests.house import PACKAGE

OPTIONS = {
    "policy": "take",
    "budget": 48,
    "take_chunk": 64,
    "take_probe": 16,
    "min_prompt": 0,
    "policies": "all",
}
DOCUMENT = Ask(301, "kvzip", 0.2, prefix_len=280, max_tokens=8)
REQUESTS = {
    "ada-snapkv": [Ask(300, "ada-snapkv", 0.2, max_tokens=8)],
    "kvzip": [DOCUMENT, DOCUMENT],
    "take": [Ask(333, "take", max_tokens=8)],
}
"""Of each walk, one after the other."""


@contextlib.contextmanager
def passed() -> Iterator[dict[str, str]]:
    """The files of which a function runs meanwhile, each with the first one, in their order."""
    files: dict[str, str] = {}
    names = {str(path): path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}

    def see(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in names and code.co_name != "<module>":
            files.setdefault(names[code.co_filename], code.co_qualname)

    threading.setprofile(see)
    sys.setprofile(see)
    yield files
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def walks(model: Path) -> dict[str, dict[str, str]]:
    """By policy, the files that its requests pass on an engine, and of each the function that runs first."""
    found: dict[str, dict[str, str]] = {}
    settings = {"additional_config": {"kv_eviction": OPTIONS}, "max_num_batched_tokens": 100}
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_KVEVICT_CHECK", None)  # which tests are run with
        with engine(model, **settings) as llm:
            for policy, asks in REQUESTS.items():
                with passed() as found[policy]:
                    for ask in asks:
                        run(llm, [ask], recorded=False)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = walks(make_model(folder))
    for policy, files in found.items():
        print(f"{policy}:")
        for file, function in files.items():
            print(f"  {file:<42} {function}")


if __name__ == "__main__":
    main()
