"""See which tokens of a prompt a policy keeps, in each layer and KV head.

A real engine reads the prompt once with each policy. What was kept is written as one HTML page that needs no network.
All other arguments are those of `vllm serve` for its engine: --dtype, --max-model-len, --tensor-parallel-size,
--gpu-memory-utilization, --kv-cache-memory-bytes and so on; --kv-eviction-config sets parameters of POLICY. Of its
front end's arguments, those for chat templates go with --chat: --chat-template, --chat-template-content-format,
--default-chat-template-kwargs and --trust-request-chat-template.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.chats import read_chat, read_text
from vllm_kvevict.inspect.data import Inspection
from vllm_kvevict.inspect.page import render
from vllm_kvevict.inspect.turns import lines_of
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.policy_list import GRAMMAR, checked
from vllm_kvevict.quiet import quieten

FLAGS = {
    "--kv-eviction": "--policy",
    "kv_eviction": "--policy",
    "--kv-budget": "--budget",
    "kv_budget": "--budget",
    "kv_prefix_len": "--prefix-len",
    "kv_turns": "--turns",
}
"""Flags and fields that errors of the engine name, and what they are called here."""

OWN_ARGUMENTS = {
    "kv_eviction": "--policy",
    "kv_budget": "--budget",
    "model": "the first argument",
}
"""vLLM's arguments that are given in another way here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; others are vLLM's."""
    _add_prompt(parser)
    _add_policies(parser)


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    """What is read, and where it is evicted."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id, as for `vllm serve`")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", metavar="FILE", help="the prompt, a file of text in UTF-8; - is standard input"
    )
    what.add_argument(
        "--chat",
        metavar="FILE",
        help="a chat instead, evicted turn by turn as a server does with scope turns: JSON, a list of messages or the "
        "body of a request to /v1/chat/completions",
    )
    parser.add_argument(
        "--branch",
        metavar="FILE",
        help="with --chat: another chat that begins like it; the page shows both, and which turns they share",
    )
    parser.add_argument(
        "--prefix-len",
        type=int,
        metavar="N",
        help="evict after the first N tokens of the prompt; the policy does not see the tokens after them, which are "
        "all kept",
    )
    parser.add_argument(
        "--turns",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="evict the prompt turn by turn: numbers of tokens after which its turns end, as for kv_turns",
    )


def _add_policies(parser: argparse.ArgumentParser) -> None:
    """How much which policies keep, and where the page goes."""
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
        metavar="POLICY",
        help=f"other policies to show beside it, each as {GRAMMAR}, such as ada-snapkv:kernel=31; each with parameters "
        "gets an engine of its own, one after another",
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
        usage=f"{program} MODEL (--prompt FILE | --chat FILE) [options] [arguments of vllm serve]",
        description=__doc__,
        allow_abbrev=False,
    )
    add_arguments(parser)
    args, words = parser.parse_known_args(arguments)
    try:
        _check_sources(args)
        _check_targets(args)
        inspection = _read(args, words, program)
        _write("--output", args.output, render(inspection))
        if args.json:
            _write("--json", args.json, json.dumps(inspection.to_json(), ensure_ascii=False))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        parser.error(f"{package} is not installed: install vLLM, which reads the prompt")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(" ".join(str(error).split()))
    for line in lines_of(inspection):
        _tell(line)
    _tell(f"wrote {args.output}" + (f" and {args.json}" if args.json else ""))


def _check_sources(args: argparse.Namespace) -> None:
    """Refuse arguments that say in two ways where a prompt is evicted, and a branch of nothing."""
    ways = {"--chat": args.chat, "--turns": args.turns, "--prefix-len": args.prefix_len is not None}
    given = [flag for flag, value in ways.items() if value]
    if len(given) > 1:
        raise ValueError(f"{given[0]} cannot be used with {given[1]}: each says where a prompt is evicted")
    if args.branch and not args.chat:
        raise ValueError("--branch is for --chat: it is another chat that begins like it")


def _check_targets(args: argparse.Namespace) -> None:
    """Refuse files that could not be written, before an engine works for them, and files that must not be lost."""
    sources = {"--prompt": args.prompt, "--chat": args.chat, "--branch": args.branch}
    taken = {Path(name).resolve(): flag for flag, name in sources.items() if name}
    for flag, target in {"--output": args.output, "--json": args.json}.items():
        if target is None:
            continue
        path = target.resolve()
        if path in taken:
            raise ValueError(f"{flag} {target} is the file of {taken[path]}: name another one")
        taken[path] = flag
        if path.is_dir():
            raise ValueError(f"{flag} {target} is a folder: name a file")
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {target}: there is no such folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{flag} {target} cannot be written: choose another place")


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _read(args: argparse.Namespace, words: Sequence[str], program: str) -> Inspection:
    """Read the prompt with an engine; vLLM is imported once the command's own arguments are known to be good."""
    try:
        policies = checked([args.policy, *args.compare], available())
        for entry in policies:
            if entry.texts:
                EvictionConfig(entry.policy, keep_ratio=0.5, **entry.parameters)
    except ValueError as error:
        raise ValueError(f"--compare: {error}") from None
    text = read_text(args.prompt, "--prompt") if args.prompt else ""
    sources = {"--chat": args.chat, "--branch": args.branch}
    chats = [read_chat(name, flag) for flag, name in sources.items() if name]
    quieten()
    # The engine runs in this process: its workers are asked by functions, which vLLM sends nowhere else.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_kvevict.engine import registration

    if reason := registration.install():
        raise ValueError(reason)
    from vllm_kvevict.engine import read
    from vllm_kvevict.inspect import inspection

    budget = read.budget(args.budget, "--budget")
    given, template = inspection.parse_server_arguments(program, words)
    for name, ours in OWN_ARGUMENTS.items():
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} is not an argument of this command: use {ours}")
    if template and not chats:
        raise ValueError(
            f"--{next(iter(template)).replace('_', '-')} is for --chat: a prompt has no template"
        )
    try:
        wanted = inspection.Wanted(
            args.model, text, policies, budget, args.prefix_len, given, _tell, args.turns, chats, template
        )
        return inspection.inspect(wanted)
    except (ValueError, RuntimeError) as error:
        raise ValueError(_by_our_names(str(error))) from error


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _by_our_names(message: str) -> str:
    names = "|".join(rf"(?<![\w.-]){flag}(?![\w.-])" for flag in FLAGS)
    return re.sub(names, lambda found: FLAGS[found[0]], message)


if __name__ == "__main__":
    main()
