"""What users are told when something cannot be served."""

import os
import sys
from typing import NoReturn

from pydantic import ValidationError


class KVEvictionError(ValueError):
    """A setting that cannot be served; the message is one sentence that names the flag or field."""

    def __init__(self, message: str, field_name: str | None = None):
        super().__init__(message)
        self.field_name = field_name


def refused(name: str, words: str) -> KVEvictionError:
    """What is said of a field or flag, by its name and what is wrong."""
    return KVEvictionError(f"{name} {words}", name)


def finds_none(policy: str, needed: str) -> KVEvictionError:
    """What a server says of a policy that needs something of the model which it has not, or not so that it is read."""
    return KVEvictionError(
        f"--kv-eviction {policy} needs {needed}, and finds none in this model: choose another policy"
    )


def other_scheduler(scheduler: str | type) -> KVEvictionError:
    """What a server says whose scheduler was set by somebody else, after the flags were read."""
    name = scheduler if isinstance(scheduler, str) else f"{scheduler.__module__}.{scheduler.__qualname__}"
    return KVEvictionError(
        f"--kv-eviction cannot be combined with the scheduler {name}, which another plugin has set: eviction uses its "
        "own, so remove one of the two"
    )


def in_one_line(error: Exception) -> str:
    """What an error of vLLM's says. Its configuration's come from pydantic, which adds addresses and objects."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
    return " ".join(text.split())


def end_command(error: object) -> NoReturn:
    """End this process like argparse does: one line on stderr, exit code 2."""
    program = [os.path.basename(sys.argv[0]), *(word for word in sys.argv[1:2] if word[:1] != "-")]
    print(f"{' '.join(program)}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
