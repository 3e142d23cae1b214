"""How this process says what it refuses: one line to who typed a command, an exception to who called from Python."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence

from vllm_kvevict.engine.errors import KVEvictionError, end_command, in_one_line

_on_command_line = False
"""Whether this process took its engine arguments from a command line, whose users want no traceback."""


def note() -> None:
    """From now on errors end this process with one line."""
    global _on_command_line
    _on_command_line = True


def raise_errors() -> None:
    """Let this process, though its arguments came from a command line, get errors as exceptions."""
    global _on_command_line
    _on_command_line = False


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End a command like argparse does: one line on stderr, exit code 2. Callers from Python get the exception."""
    try:
        yield
    except KVEvictionError as error:
        if not _on_command_line:
            raise
        end_command(error)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Arguments as vLLM reads them, those of a file (``--config``) too, with which it ends in a traceback.

    Raises:
        SystemExit: the arguments, or the file, are wrong; one line on stderr says how.
    """
    try:
        return parser.parse_args(list(words))
    except Exception as error:
        if "--config" not in words:
            raise
        # argparse deals with its own errors; the file may hold anything.
        is_no_mapping = isinstance(error, (AttributeError, TypeError))
        parser.error(
            f"--config: {'the file must map flags to their values' if is_no_mapping else in_one_line(error)}"
        )
