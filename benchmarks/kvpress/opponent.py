"""The process that runs kvpress, as seen from here."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness.sides import preloads

WORKER = Path(__file__).with_name("worker.py")
LOG = Path(__file__).parents[1] / "out" / "kvpress.log"


class OpponentError(RuntimeError):
    """The process ended."""


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

        Returns:
            The answer, or only ``error`` if kvpress could not do it.
        """
        order = {"prompts": prompts, "output_len": output_len, "press": press, "budget": budget}
        assert self._process.stdin
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise OpponentError(f"the process of kvpress ended, see {self.log}") from None
        return self._receive()

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
