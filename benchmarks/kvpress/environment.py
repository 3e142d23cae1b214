"""The virtual environment of kvpress: it needs an older transformers than vLLM, so both cannot share one."""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

FOLDER = Path(__file__).parents[2] / ".venv-kvpress"
TORCH = "torch==2.13.0+cpu"
"""The build that vLLM uses as well; PyPI does not have it."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OTHERS = ("kvpress==0.5.5", "transformers==5.2.0")
"""The newest transformers that this kvpress accepts (it asks for less than 5.3)."""
LOG_LINES = 15


class InstallError(RuntimeError):
    """The environment could not be built; the message holds the end of pip's output."""


def kvpress_python(console: Console, folder: Path = FOLDER) -> Path:
    """The interpreter of kvpress's environment, which is built if it is missing or out of date.

    Raises:
        InstallError: if a step of the installation fails.
    """
    python, stamp = folder / "bin/python", folder / ".installed"
    wanted = "\n".join((TORCH, *OTHERS))
    # The stamp is written last: an installation that was interrupted is repeated.
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    console.print(f"kvpress 1/3: {folder.name} (once; 1.4 GB, about a minute)", highlight=False)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
    console.print(f"kvpress 2/3: {TORCH}", highlight=False)
    known = subprocess.run(
        [*pip, "install", "--dry-run", "--no-deps", "--quiet", TORCH], capture_output=True, check=False
    )
    index = [] if known.returncode == 0 else ["--extra-index-url", TORCH_INDEX]
    _run([*pip, "install", TORCH, *index], log)
    console.print(f"kvpress 3/3: {' '.join(OTHERS)}", highlight=False)
    # torch is named again, so that nothing replaces it by PyPI's build for GPUs.
    _run([*pip, "install", TORCH, *OTHERS, *index], log)
    log.rename(folder / "install.log")
    stamp.write_text(wanted)
    return python


def _run(command: list[str], log: Path) -> None:
    with log.open("a") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        end = "\n".join(log.read_text().splitlines()[-LOG_LINES:])
        raise InstallError(f"{' '.join(command[1:])} failed (all of its output: {log.name}):\n{end}")
