"""See which tokens of a prompt a policy keeps, in each layer and KV head.

A real engine reads the prompt once with each policy. What was kept is written as one HTML page that needs no network.
All other arguments are those of `vllm serve`: --dtype, --max-model-len, --tensor-parallel-size,
--gpu-memory-utilization, --kv-cache-memory-bytes and so on; --kv-eviction-config sets parameters of POLICY.
"""

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.inspect.data import Inspection
from vllm_kvevict.inspect.page import render
from vllm_kvevict.policies import available

FLAGS = {
    "--kv-eviction": "--policy",
    "kv_eviction": "--policy",
    "--kv-budget": "--budget",
    "kv_budget": "--budget",
    "kv_prefix_len": "--prefix-len",
}
"""Flags and fields that errors of the engine name, and what they are called here."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so that its workers can be asked
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of workers
}
"""What is set before vLLM is imported, unless the user has set it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; others are vLLM's."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id, as for `vllm serve`")
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="FILE",
        help="the prompt, a file of text in UTF-8; - is standard input",
    )
    parser.add_argument(
        "--policy",
        default="ada-snapkv",
        choices=available(),
        metavar="POLICY",
        help="policy on the left (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        default="0.2",
        metavar="X",
        help="how much to keep, for all policies: a share of the prompt in (0, 1], or tokens per KV head above 1 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        choices=available(),
        metavar="POLICY",
        help="other policies to show beside it",
    )
    parser.add_argument(
        "--prefix-len",
        type=int,
        metavar="N",
        help="evict after the first N tokens of the prompt; the policy does not see the tokens after them, which are "
        "all kept",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("inspect.html"),
        metavar="PAGE",
        help="the page (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the data of the page as JSON")


def main(arguments: Sequence[str] | None = None, program: str = "python -m vllm_kvevict.inspect") -> None:
    """The command.

    Args:
        arguments: behind its name; those of the process if None.
        program: its name.
    """
    parser = argparse.ArgumentParser(
        program,
        usage=f"{program} MODEL --prompt FILE [options] [vLLM's engine arguments]",
        description=__doc__,
        allow_abbrev=False,
    )
    add_arguments(parser)
    args, words = parser.parse_known_args(arguments)
    try:
        inspection = _read(args, words, program)
        args.output.write_text(render(inspection), "utf-8")
        if args.json:
            args.json.write_text(json.dumps(inspection.to_json(), ensure_ascii=False), "utf-8")
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: install vLLM, which reads the prompt")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(" ".join(str(error).split()))
    _tell(f"wrote {args.output}" + (f" and {args.json}" if args.json else ""))


def _read(args: argparse.Namespace, words: Sequence[str], program: str) -> Inspection:
    """Read the prompt with an engine; vLLM is imported once the command's own arguments are known to be good."""
    policies = list(dict.fromkeys([args.policy, *args.compare]))
    text = _prompt(args.prompt)
    for flag, target in {"--output": args.output, "--json": args.json}.items():
        if target and not target.resolve().parent.is_dir():
            raise ValueError(f"{flag} {target}: there is no such folder")
    _set_environment()
    from vllm_kvevict.engine import inspection
    from vllm_kvevict.engine.config import parse_budget

    budget = parse_budget(args.budget, "--budget")
    given = inspection.parse_engine_arguments(program, words)
    for name, ours in {"kv_eviction": "--policy", "kv_budget": "--budget"}.items():
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is not an argument of this command: use {ours}")
    try:
        return inspection.inspect(args.model, text, policies, budget, args.prefix_len, given, _tell)
    except (ValueError, RuntimeError) as error:
        raise ValueError(_by_our_names(str(error))) from error


def _prompt(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"--prompt {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompt {name} is not text in UTF-8") from None


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.simplefilter("ignore", FutureWarning)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _by_our_names(message: str) -> str:
    names = "|".join(rf"(?<![\w.-]){flag}(?![\w.-])" for flag in FLAGS)
    return re.sub(names, lambda found: FLAGS[found[0]], message)


if __name__ == "__main__":
    main()
