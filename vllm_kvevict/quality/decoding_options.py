"""The arguments of ``vllm-kvevict quality answers``."""

import argparse
from typing import Any

from vllm_kvevict.quality.decoding_tasks import TASKS
from vllm_kvevict.quality.options import (
    add_patience,
    add_target,
    add_whole,
    check_least,
    check_tasks,
)
from vllm_kvevict.quality.prompts import SHAPES


def add_answers(commands: Any) -> argparse.ArgumentParser:
    """The command with its arguments.

    Args:
        commands: of the program, as argparse holds them.
    """
    parser = commands.add_parser(
        "answers",
        help="measure how far answers change that are evicted while they are written",
        description="Lets the full cache of a running server write long answers, and scores them token by token while "
        "the server evicts them, behind the first eviction. Answers that recall facts of their own beginning are "
        "scored beside them. Measures are appended to FOLDER/decoding.jsonl; started again, it continues, also on a "
        "server with another policy. Start the server with --kv-eviction full, --kv-decode-budget D, "
        "--kv-eviction-config.decode_policy POLICY and --dtype float32.",
    )
    add_target(parser)
    _add_evictions(parser)
    _add_lengths(parser)
    add_patience(parser, concurrency=4)
    return parser


def _add_evictions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("eviction")
    group.add_argument(
        "--policy",
        required=True,
        metavar="POLICY",
        help="the server's decode_policy, as the report is to name it; run the command again for each server",
    )
    group.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[256],
        metavar="D",
        help="tokens of the answer that each KV head keeps (default: 256)",
    )
    group.add_argument(
        "--interval",
        type=int,
        metavar="I",
        help="the server's decode_interval, if it was started with one (default: the server's default)",
    )


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help=f"your own, a file of JSON lines: {SHAPES} (default: ours)",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="writing: answers that the model writes; recall: answers that repeat facts of their beginning "
        "(default: both)",
    )
    add_whole(group, "--samples", 20, "answers of each task")
    add_whole(group, "--answer-tokens", 1024, "length of the answers that the model writes")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="at which it writes (default: %(default)s)",
    )
    add_whole(group, "--seed", 0, "seed of prompts and answers")
    add_whole(
        group, "--top", 20, "tokens whose log-probabilities are compared; at most the server's --max-logprobs"
    )


def check_answers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured, and fill in defaults."""
    check_least(parser, arguments)
    if arguments.prompts and arguments.tasks:
        parser.error("--tasks cannot be combined with --prompts")
    arguments.tasks = check_tasks(parser, arguments.tasks, list(TASKS))
    if min(*arguments.budgets, 1 if arguments.interval is None else arguments.interval) < 1:
        parser.error("--budgets and --interval must be positive")
