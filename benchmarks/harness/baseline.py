"""Another version of this package to compare with, in a Python environment of its own."""

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_kvevict.machine import PACKAGES

PROBE = """
import importlib.metadata, importlib.util, json, sys
print(json.dumps([
    {name: importlib.metadata.version(name) for name in sys.argv[1:]},
    importlib.util.find_spec("vllm_kvevict").origin,
]))
"""
"""What the environment's Python is asked for: versions, and the file that this package is imported from. That version
may be of any age, so none of its own code is used."""


@dataclass(frozen=True)
class Baseline:
    """What serves the sides that ours are compared with.

    Attributes:
        environment: the folder of the Python environment, as it was given.
        versions: of the packages there.
        commit: if this package is imported from a checkout.
    """

    environment: str
    versions: dict[str, str]
    commit: str | None

    @property
    def vllm(self) -> Path:
        """The command that serves."""
        return Path(self.environment).absolute() / "bin" / "vllm"


def installed(text: str) -> Baseline:
    """The version in a Python environment of the command line.

    Raises:
        argparse.ArgumentTypeError: if vLLM or this package is missing there.
    """
    folder = Path(text) / "bin"
    for name in ("python", "vllm"):
        if not (folder / name).is_file():
            raise argparse.ArgumentTypeError(
                f"there is no {folder / name}: give a Python environment with vLLM and this package, such as the .venv "
                "that `make install` builds in another checkout"
            )
    # Isolated, since Python otherwise imports from the folder in which this command runs.
    command = [str(folder / "python"), "-I", "-c", PROBE, *PACKAGES]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().rpartition("\n")[2]
        raise argparse.ArgumentTypeError(f"this package cannot be imported in {text}: {reason}")
    versions, file = json.loads(asked.stdout)
    return Baseline(text, versions, commit_of(Path(file)))


def commit_of(file: Path) -> str | None:
    """The commit of the checkout that has this file, with ``-dirty`` if it was changed; None outside a checkout."""
    inside = ["git", "-C", str(file.parent)]
    # Also asked of files that are installed in a checkout's .venv, which are not of its commit.
    tracked = subprocess.run([*inside, "ls-files", "--error-unmatch", file.name], capture_output=True)
    if tracked.returncode:
        return None
    describe = [*inside, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
