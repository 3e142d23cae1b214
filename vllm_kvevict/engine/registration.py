"""What vLLM calls in every process: the plugin in the version it was made for, in any other a look for its flags."""

import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from vllm_kvevict.compatibility import refusal
from vllm_kvevict.engine.errors import KVEvictionError, end_command
from vllm_kvevict.engine.names import FLAGS, KEY


@functools.cache
def install() -> str | None:
    """Teach vLLM's engine arguments about eviction, unless this package was not tested with this version.

    Returns:
        Why it was not done, in one sentence. Then nothing of vLLM is wrapped or imported.
    """
    from vllm.version import __version__ as found

    reason = refusal(found)
    if reason is None:
        from vllm_kvevict.engine import versions

        versions.choose(found)
        from vllm_kvevict.engine.frontend import plugin

        plugin.register()
    return reason


def register() -> None:
    """What vLLM calls, through the ``vllm.general_plugins`` entry point, in every process that it starts.

    Raises:
        KVEvictionError: eviction was asked for from Python in a version that this package was not tested with.
        SystemExit: the same on the command line.
    """
    reason = install()
    if reason is None:
        return
    try:
        asked_by_flags, asked_by_code = asked_on_command_line(sys.argv[1:]), _asked_in_python()
    except Exception:
        # A look that fails, in a process of a vLLM that nobody knew here, must not stop those who ask for nothing.
        return
    if asked_by_flags:
        end_command(reason)
    if asked_by_code:
        raise KVEvictionError(reason)


def asked_on_command_line(words: Sequence[str]) -> bool:
    """Whether flags or ``--additional-config`` ask for eviction, in any of the forms that vLLM takes."""
    words = [*words, *_words_of_files(words)]
    names = {re.split("[=.]", word)[0].replace("_", "-") for word in words if word.startswith("--")}
    if names & FLAGS:
        return True
    return "--additional-config" in names and any(KEY in word.replace("-", "_") for word in words)


def _words_of_files(words: Sequence[str]) -> Iterator[str]:
    """What the files of ``--config`` say, as words of a command line; vLLM itself says what is wrong with a file."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, is_joined, value = word.partition("=")
        if name != "--config":
            continue
        path = Path(value if is_joined else following)
        try:
            # vLLM reads the file once more, and a pipe gives its content once.
            settings = yaml.safe_load(path.read_text()) if path.is_file() else None
        except (OSError, ValueError, yaml.YAMLError):
            continue
        for key, setting in settings.items() if isinstance(settings, dict) else ():
            yield from (f"--{key}", str(setting))


def _asked_in_python() -> bool:
    """Whether the engine arguments or the configuration for which vLLM loads its plugins ask for eviction.

    vLLM hands plugins nothing, and wrapping its classes is what must not happen here, so the callers are looked at.
    """
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        for name in ("self", "vllm_config"):
            # Statically: whoever calls may be an object that computes its attributes.
            settings = inspect.getattr_static(frame.f_locals.get(name), "additional_config", None)
            if isinstance(settings, dict) and KEY in settings:
                return True
    return False
