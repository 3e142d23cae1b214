"""Commands, parsed by the programs that they name, but not run: a program of its own, for any environment.

Reads a JSON list of the words of each from stdin, and writes what each program says against them, which may be nothing.
"""

import contextlib
import functools
import io
import json
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

from vllm.benchmarks.serve import add_cli_args as add_client_args
from vllm.benchmarks.throughput import add_cli_args as add_throughput_args
from vllm.entrypoints.cli.openai import CompleteCommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvevict.engine import versions
from vllm_kvevict.engine.request_options import REQUEST_FIELDS

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("docker", "ray", "pip", "curl", "git", "rm", "twine", "export", "cd")
"""Programs that are not this project's."""


@functools.cache
def _help(module: str) -> str:
    """What a module or script prints for --help."""
    out = io.StringIO()
    name, *words = module.split()
    with (
        mock.patch.object(sys, "argv", [name, *words, "--help"]),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__")
    return out.getvalue()


def _check_options(module: str, words: list[str]) -> None:
    assert _help(module), "there is no help"
    for word in words:
        if word.startswith("--"):
            option = re.split("[=.]", word)[0]
            known = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", _help(module))
            assert known, f"{option} is not in the help"


@functools.cache
def _serve_parser() -> FlexibleArgumentParser:
    make_arg_parser = versions.load(versions.moves().make_arg_parser)
    return make_arg_parser(FlexibleArgumentParser())


def _check_vllm(command: str, words: list[str]) -> None:
    parser = FlexibleArgumentParser()
    if command == "serve":
        _serve_parser().parse_args(words)
    elif command == "complete":
        CompleteCommand.add_cli_args(parser).parse_args(words)
    elif words[0] == "throughput":
        add_throughput_args(parser)
        parser.parse_args(words[1:])
    else:
        assert (command, words[0]) == ("bench", "serve"), f"nobody parses vllm {command}"
        add_client_args(parser)
        assert {*parser.parse_args(words[1:]).extra_body["vllm_xargs"]} <= {*REQUEST_FIELDS}


def _check_python(words: list[str]) -> None:
    module = words[1] if words[0] == "-m" else words[0]
    if module == "pytest":
        assert all((ROOT / path).exists() for path in words[2:]), "no such tests"
    elif module != "build":
        _check_options(module, words[1:])


def check(words: list[str]) -> None:
    """Raise an exception, SystemExit among them, if a command is none that the program takes."""
    program, *rest = words
    if program == "vllm":
        _check_vllm(rest[0], rest[1:])
    elif program == "vllm-kvevict" and rest[0] == "doctor":
        _serve_parser().parse_args(rest[1:])
    elif program == "vllm-kvevict":
        _check_options(" ".join(["vllm_kvevict", *rest[: 1 + (rest[0] == "quality")]]), rest)
    elif program == "lm_eval":
        _check_options(f"lm_eval {rest[0]}", rest)
    elif program == "python":
        _check_python(rest)
    elif program == "pytest":
        _check_python(["-m", "pytest", *rest])
    elif program == "make":
        target = rest[2] if rest[0] == "-C" else rest[0]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), "no such target"
    else:
        assert program in ELSEWHERE, f"nobody parses {program}"


def complaint(words: list[str]) -> str:
    """What is wrong with a command, or nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            check(words)
    except (Exception, SystemExit) as error:
        return f"{error!r} {said.getvalue()}"
    return ""


if __name__ == "__main__":
    sys.path.append(str(ROOT))  # behind the package that is installed
    with contextlib.redirect_stdout(sys.stderr):
        complaints = [complaint(words) for words in json.load(sys.stdin)]
    print(json.dumps(complaints))
