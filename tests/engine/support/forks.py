"""Commands without their imports: one process imports vLLM; servers, their workers and commands are forked from it.

Three processes of every server else import it one after the other, which takes far longer than most tests.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.engine.support.forked"])


class Forked:
    """A forked process, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, process: multiprocessing.Process):
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork(
    words: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None
) -> Forked:
    """Start a command as leader of a session of its own.

    Args:
        words: ``vllm`` or ``vllm-kvevict``, and what follows.
        output: the file for what it writes.
        errors: the file for what it writes to stderr, if that is another one.
    """
    with mock.patch.dict(os.environ, environment, clear=True):  # what is imported first may read some of it
        forkserver.ensure_running()
    process = FORKS.Process(target=run, args=(list(words), dict(environment), output, errors))
    process.start()
    return Forked(process)


def run(words: list[str], environment: dict[str, str], output: Path, errors: Path | None) -> None:
    """What the forked process does."""
    os.setsid()
    for path, descriptor in ((output, 1), (errors or output, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    from tests.engine.support import forked

    sys.exit(forked.main())
