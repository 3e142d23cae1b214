"""What measurements come from: the machine, the versions, the command; needs neither torch nor vLLM."""

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from vllm_kvevict.kernels import processor

PACKAGES = ("vllm-kvevict", "vllm", "torch", "numpy")


def cpu_model() -> str:
    """The processor's name, as Linux gives it."""
    return processor.described("model name") or platform.processor()


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def record(command: Sequence[str], results: Any) -> dict[str, Any]:
    """The results with the command, machine, versions and date that made them."""
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "level": processor.level(),
        "versions": versions(),
        "results": results,
    }
