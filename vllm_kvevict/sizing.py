"""How many requests fit a KV memory, with and without eviction: ``vllm-kvevict sizing --help``.

The engine's own ledger and bounds (``engine/sizing.py``) compute the numbers for the kind of device that the installed
vLLM is built for; vLLM is imported once they are needed.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vllm_kvevict.kernels.layout import INT8
from vllm_kvevict.policies import available
from vllm_kvevict.quiet import quieten
from vllm_kvevict.server import Server

DTYPES = ("auto", "bfloat16", "float16", "float32")
FLAGS = {
    "--kv-eviction-config": "--config",
    "--kv-eviction": "--policy",
    "--kv-budget": "--budget",
    "--kv-decode-budget": "--decode-budget",
    "kv_turns": "--turn",
    "max_model_len": "--max-model-len",
}
COLUMNS = (
    "budget",
    "kept",
    "answer",
    "reading",
    "evicted",
    "end",
    "at once",
    "at end",
    "longest",
    "layered",
    "cached",
    "limit",
)
IN_MIB = ("reading", "evicted", "end")
OF_CONVERSATIONS = ("chats", "with tail")
"""Columns that --turn adds."""

DESCRIPTION = (
    "Computes how many requests fit a KV memory, with and without eviction. It reads the model's configuration, starts "
    "no server, and computes with the same functions as the server."
)
LEGEND = """
kept: KV entries per KV head of a prompt; answer: of its answer, at most. reading, evicted, end: MiB that a request
holds on its fullest rank: at most while its prompt is read, after its eviction, at its last token, or, where
--decode-budget bounds the answer, at most until then. at once: how many requests run when many arrive together; limit:
what limits that number. at end: how many requests fit if all hold what they do at the end; if that is less than at
once, some may be preempted. longest: the longest prompt that fits alone, and the longest
--max-model-len that vLLM starts with: it keeps one block back, which the tokens that fit without eviction leave out,
too. layered: whether the prompt is evicted layer
by layer while it is read. cached: how many compressed prefixes as long as the prompt fit if the memory holds nothing
else; they are cached with kv_prefix_len, kv_turns and scopes prefix and turns. Where heads compete, the numbers assume
that all ranks keep as much. chats, with --turn: how many conversations as long as the prompt stay cached if the memory
holds nothing else, each of their turns compressed on its own; with tail: how many if each has one turn more, the last
question and answer, that is not compressed yet. With keep_first the first turn stays whole. Each turn counts as one of
4,096 compressed prefixes, and takes a page more in each layer and KV head where it ends within one. On the line
without eviction nothing is compressed. price, with a lookahead: how many times as much memory times time an answer
takes as without, since its whole prompt is held until then; reading includes that, and evicted is what is held then."""

SIZES: dict[str, Any] = {x.name: x.default for x in fields(Server) if isinstance(x.default, int)}
ABOUT = {
    "prompt": "tokens of each prompt",
    "output": "tokens of each answer",
    "page_size": "tokens in a page, as for --kv-eviction-config.page_size",
}


def parse_memory(text: str) -> int:
    """Bytes in ``20GiB``, ``500MB`` or ``4096B``. A number without a unit is refused: few who write 20 mean bytes."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kmgt]?)(i?)b", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a size with its unit, such as 20GiB, got {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--model", required=True, help="a folder, a config.json or a Hugging Face id")
    parser.add_argument(
        "--memory", required=True, type=parse_memory, help="KV memory per rank, such as 20GiB"
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        default=["0.1", "0.2", "0.4"],
        metavar="X",
        help="budgets to compare, as for --kv-budget (default: 0.1 0.2 0.4)",
    )
    parser.add_argument(
        "--policy",
        default="ada-snapkv",
        choices=available(),
        metavar="POLICY",
        help="as for --kv-eviction (default: %(default)s)",
    )
    parser.add_argument(
        "--config", type=json.loads, default={}, metavar="JSON", help="as for --kv-eviction-config"
    )
    parser.add_argument(
        "--decode-budget",
        type=int,
        default=0,
        metavar="N",
        help="as for --kv-decode-budget, on all lines but the first (default: 0, answers are kept)",
    )
    for name, default in {"prompt": 8192, "output": 512, **SIZES}.items():
        flag = "--" + name.replace("_", "-")
        about = ABOUT.get(name, "as for vllm serve")
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{about} (default: %(default)s)"
        )
    parser.add_argument(
        "--turn",
        type=int,
        metavar="N",
        help="tokens of each turn, question and answer: two more columns say how many conversations stay cached that "
        "are as long as --prompt",
    )
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="as for vllm serve, in tokens (default: the model's)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="type of keys and values; auto is one of 16 bits (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", INT8),
        help="as for vllm serve; auto is that of --dtype (default: %(default)s)",
    )


def main(words: Sequence[str] | None = None, program: str = "python -m vllm_kvevict.sizing") -> int:
    """Print the table for the command line, by default that of ``sys.argv``; the exit code."""
    parser = argparse.ArgumentParser(program, description=DESCRIPTION, epilog=LEGEND)
    add_arguments(parser)
    args = parser.parse_args(words)
    try:
        print(report(args))
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: install vLLM, whose functions compute the numbers")
    except ValueError as error:
        parser.error(re.sub("|".join(FLAGS), lambda found: FLAGS[found[0]], str(error)))
    return 0


def report(args: argparse.Namespace) -> str:  # noqa: C901
    """The model's figures and the table, a line without eviction first."""
    for name in ("prompt", "output", *SIZES):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.turn is not None and not 1 <= args.turn <= args.prompt:
        raise ValueError(f"--turn must be from 1 to the {args.prompt} tokens of --prompt, got {args.turn}")
    if args.block_size % args.page_size:
        raise ValueError(f"--page-size {args.page_size} must divide --block-size {args.block_size}")
    quieten("CRITICAL")  # what is wrong is said below
    from vllm_kvevict.engine import sizing

    model = sizing.read_model(args.model, args.max_model_len, args.dtype)
    if args.prompt + args.output > model["max_len"]:
        limit = "--max-model-len" if args.max_model_len else "the model"
        raise ValueError(f"--prompt and --output exceed the {model['max_len']} tokens of {limit}: lower them")
    server = Server(
        **model,
        memory=args.memory,
        kv_cache_dtype=args.kv_cache_dtype,
        **{name: getattr(args, name) for name in SIZES},
    )
    runs: list[dict[str, Any]] = [{"policy": "full"}]
    settings = {**args.config, "policy": args.policy, "decode_budget": args.decode_budget}
    if args.policy != "full":
        runs += [{**settings, "budget": budget} for budget in args.budget]
    elif args.decode_budget:
        runs.append(settings)
    rows = [sizing.size(server, settings, args.prompt, args.output) for settings in runs]
    columns = list(COLUMNS) + ["price"] * bool(args.config.get("lookahead"))
    if args.turn is not None:
        columns += OF_CONVERSATIONS
        chats = [sizing.conversations(server, settings, args.prompt, args.turn) for settings in runs]
        rows = [row | more for row, more in zip(rows, chats, strict=True)]
    table = _table(columns, rows)
    token, fit = (
        server.layout.entry_bytes * server.kv_heads * server.layers,
        sizing.counted_blocks(server) * server.block_size,
    )
    head = f"KV of one token: {token:,} bytes in all layers and heads; {fit:,} tokens fit without eviction"
    reserve, policies = sizing.reserve(server, settings)
    if policies:
        head += (
            f"\nBesides the KV memory each rank reserves {reserve / 2**20:.1f} MiB for requests with "
            f"{', '.join(policies)}"
        )
    queries, requests = sizing.kept_queries(server, settings)
    if queries:
        head += (
            f"\nBesides the KV memory each rank keeps {queries / 2**20:.3f} MiB of queries for each request, with room "
            f"for {requests:,} requests, or for --max-num-seqs if that is less"
        )
    return "\n".join((head, *table, LEGEND))


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of right-aligned cells, names of columns first."""
    cells = [
        [f"{row[name] / 2**20:.1f}" if name in IN_MIB else str(row[name]) for name in columns] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in (columns, *cells)]


if __name__ == "__main__":
    sys.exit(main())
