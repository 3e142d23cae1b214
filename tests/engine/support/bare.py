"""Programs as ``python`` runs them, but for its imports: forked from a process that has imported vLLM and nothing of
this package, which takes far longer than what most of them do.

    python -m tests.engine.support.bare

forks one for each line that it reads, and writes the exit code.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "vllm_kvevict"
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
)


def run(
    *words: str, env: Mapping[str, str], cwd: Path, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Args:
        words: ``-c`` and its code, or the path of a script; then what follows.
        env: all of its environment.
    """
    forking = _forking(cwd)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        told = {"words": words, "env": dict(env), "output": str(output), "errors": str(errors)}
        assert forking.stdin is not None and forking.stdout is not None
        print(json.dumps(told), file=forking.stdin, flush=True)
        pid = int(forking.stdout.readline())
        ends = threading.Timer(timeout, os.killpg, (pid, 9))
        ends.start()
        code = int(forking.stdout.readline())
        ends.cancel()
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


@functools.cache
def _forking(cwd: Path) -> "subprocess.Popen[str]":
    """The process that programs are forked from; it ends with this one."""
    words = [sys.executable, "-m", "tests.engine.support.bare"]
    process = subprocess.Popen(words, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.terminate)
    return process


def _serve() -> dict[str, Any] | None:
    """Fork, line by line. Returns in the process that was forked, with what it is to do; None at the end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # what is imported stays
    for name in IMPORTED:
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.startswith(OURS)]
    assert not loaded, loaded
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            answers.close()
            return json.loads(line)
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return None


def _begin(words: list[str], env: dict[str, str], output: str, errors: str) -> None:
    """In the process that was forked: what a new one begins with."""
    from vllm import logger

    os.setsid()
    atexit.register(gc.unfreeze)  # libraries that are unloaded count what is left of theirs
    for path, descriptor in ((os.devnull, 0), (output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    logger._configure_vllm_root_logger()  # vLLM reads those variables where it is imported
    program, *rest = words
    if program == "-c":
        code, *rest = rest
    sys.argv = [program, *rest]
    sys.path[:1] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), sys.path[0]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a program may have tests of its own
    # What processes that vLLM starts take from this one.
    main = sys.modules["__main__"] = ModuleType("__main__")
    if program == "-c":
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = program
        sys.path.insert(0, str(Path(program).parent))
        exec(compile(Path(program).read_text(), program, "exec"), main.__dict__)


if __name__ == "__main__":
    if told := _serve():
        _begin(**told)
