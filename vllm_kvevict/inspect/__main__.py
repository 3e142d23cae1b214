"""See which tokens of a prompt a policy keeps, in each layer and KV head.

The prompt is read by a real engine, once with each policy, and what was kept is written as one HTML page that needs no
network. All further arguments are vLLM's, as `vllm serve` takes them: --dtype, --max-model-len, --tensor-parallel-size,
--gpu-memory-utilization, --kv-cache-memory-bytes and others; --kv-eviction-config sets parameters of POLICY.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.inspect.data import Inspection
from vllm_kvevict.inspect.page import render
from vllm_kvevict.policies import available

FLAGS = {"--kv-eviction-config": "--kv-eviction-config", "--kv-eviction": "--policy", "--kv-budget": "--budget"}
"""Flags that errors of the engine name, and what they are called here."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so that its workers can be asked
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "GLOO_LOG_LEVEL": "ERROR",
}
"""What is set before vLLM is imported, unless the user has set it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; others are vLLM's."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id, as of `vllm serve`")
    parser.add_argument("--prompt", required=True, metavar="FILE", help="text to read; - is standard input")
    parser.add_argument(
        "--policy", default="ada-snapkv", choices=available(), metavar="POLICY", help="default ada-snapkv"
    )
    parser.add_argument("--budget", default="0.2", metavar="X", help="as of --kv-budget, default 0.2")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        choices=available(),
        metavar="POLICY",
        help="other policies, to be shown beside it",
    )
    parser.add_argument(
        "--prefix-len",
        type=int,
        metavar="N",
        help="evict after N tokens of the prompt, without what follows in view; the rest is kept",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("inspect.html"), metavar="PAGE", help="default inspect.html"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same data as JSON, too")


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
        inspection = _inspect(args, words, program)
        args.output.write_text(render(inspection), "utf-8")
        if args.json:
            args.json.write_text(json.dumps(inspection.to_json(), ensure_ascii=False), "utf-8")
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: the prompt is read by a vLLM engine")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(_in_one_sentence(error))
    _tell(f"wrote {args.output}" + (f" and {args.json}" if args.json else ""))


def _inspect(args: argparse.Namespace, words: Sequence[str], program: str) -> Inspection:
    policies = list(dict.fromkeys([args.policy, *args.compare]))
    text = sys.stdin.read() if args.prompt == "-" else Path(args.prompt).read_text("utf-8")
    for target in filter(None, (args.output, args.json)):
        if not target.resolve().parent.is_dir():
            raise ValueError(f"{target} cannot be written: there is no such folder")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm_kvevict.engine import inspection
    from vllm_kvevict.engine.config import parse_budget

    budget = parse_budget(args.budget, "--budget")
    given = inspection.parse_engine_arguments(program, words)
    for name, ours in {"kv_eviction": "--policy", "kv_budget": "--budget"}.items():
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is called {ours} here")
    return inspection.inspect(args.model, text, policies, budget, args.prefix_len, given, _tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _in_one_sentence(error: Exception) -> str:
    """An error as one line, by the names of this command's flags."""
    names = "|".join(rf"{flag}(?![\w-])" for flag in FLAGS)
    return re.sub(names, lambda found: FLAGS[found[0]], " ".join(str(error).split()))


if __name__ == "__main__":
    main()
