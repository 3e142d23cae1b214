"""The process that runs kvpress, as seen from here, and its Python environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.sides import Outcome, Workload, preloads

WORKER = Path(__file__).with_name("worker.py")
LOG = Path(__file__).parents[1] / "out" / "kvpress.log"

FOLDER = Path(__file__).parents[2] / ".venv-kvpress"
"""kvpress needs an older transformers than vLLM, so both cannot share an environment."""
TORCH = "torch==2.13.0+cpu"
"""The build that vLLM uses as well; PyPI does not have it."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OTHERS = ("kvpress==0.5.5", "transformers==5.2.0")
"""The newest transformers that this kvpress accepts (it asks for less than 5.3)."""


class OpponentError(RuntimeError):
    """The process ended."""


def kvpress_python(folder: Path = FOLDER) -> Path:
    """The interpreter of kvpress's environment, which is built if it is missing or out of date.

    Raises:
        subprocess.CalledProcessError: a step of the installation failed; it says why on the terminal.
    """
    python, stamp = folder / "bin/python", folder / ".installed"
    wanted = "\n".join((TORCH, *OTHERS))
    # The stamp is written last: an installation that was interrupted is repeated.
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    Console(stderr=True).print(f"building {folder.name} (once; 1.4 GB, about a minute)", highlight=False)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    # Both together, so that nothing replaces this torch by PyPI's build for GPUs.
    subprocess.run([*install, TORCH, *OTHERS, "--extra-index-url", TORCH_INDEX], check=True)
    stamp.write_text(wanted)
    return python


class Opponent:
    """kvpress's own process, which holds the model. It allocates memory with the library that vLLM's workers have.

    Args:
        python: interpreter of kvpress's environment.
        model: folder of the model.
        threads: OpenMP threads.
        dtype: that the model is loaded in.
        worker: the program.
        log: file for all that the process prints.
    """

    def __init__(
        self, python: Path, model: Path, threads: int, dtype: str, worker: Path = WORKER, log: Path = LOG
    ):
        self.threads, self.dtype = threads, dtype
        self.versions: dict[str, str] = {}
        self.log = log
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(worker), str(model), dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": str(threads),
                    "LD_PRELOAD": preloads(),
                },
            )

    def wait(self) -> None:
        """Return when the model is loaded.

        Raises:
            OpponentError: if it failed, or uses another number of threads.
        """
        hello = self._receive()
        if hello["threads"] != self.threads:
            raise OpponentError(f"kvpress has {hello['threads']} threads instead of {self.threads}")
        self.versions = hello["versions"]

    def generate(
        self, prompts: list[list[int]], output_len: int, press: str | None, budget: float
    ) -> dict[str, Any]:
        """Answer prompts of the same length in one batch; see ``worker.generate`` for the answer.

        Args:
            press: a policy, or None for plain transformers.
            budget: share of the prompt that is kept.
        """
        order = {"prompts": prompts, "output_len": output_len, "press": press, "budget": budget}
        assert self._process.stdin
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise OpponentError(f"the process of kvpress ended, see {self.log}") from None
        return self._receive()

    def run(self, work: Workload, press: str | None, budget: float) -> Outcome:
        """The requests of a round."""
        answer = self.generate(work.prompts(), work.output_len, press, budget)
        return Outcome(answer["wall"], answer["cpu"], work.requests * work.output_len, answer["steps"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise OpponentError(f"the process of kvpress ended, see {self.log}")
        return json.loads(line)
