"""Which files of the project a request passes, in the order in which a function of each first runs."""

import sys
import threading
from typing import Any

from tests.house import PACKAGE

FOLDERS = ("engine/frontend", "engine/scheduler", "engine/worker", "schedules", "cache")


def files() -> set[str]:
    """All that a walk may pass, below the package; an `__init__.py` does nothing itself."""
    found = (path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix() for path in found if path.name != "__init__.py"}


class Passed:
    """While it is entered: the files of which a function runs, in the order of their first ones."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self._names = {str(PACKAGE / file): file for file in files()}

    def _see(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in self._names and code.co_name != "<module>":
            self.files.setdefault(self._names[code.co_filename], code.co_qualname)

    def __enter__(self) -> "Passed":
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
