"""Options that the commands of ``vllm-kvevict quality`` share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.policy_list import GRAMMAR, parse
from vllm_kvevict.quality import chats, questions
from vllm_kvevict.quality.results import FULL, SCOPES

POLICIES = (
    FULL,
    "streaming-llm",
    "snapkv",
    "pyramidkv",
    "ada-snapkv",
    "ada-pyramid",
    "lava",
    "lava-uniform",
    "cake",
)
"""By default: those that the report's claims are about, and the simplest one."""
TASKS = {**questions.TASKS, **chats.TASKS}
"""All on real text that have a right answer."""
TOKENS = 1024
FORMS = ("chat", "plain")
BUDGETS = (0.05, 0.1, 0.2, 0.4)
ONES = ("samples", "questions", "top", "concurrency", "tries")
LEAST = {
    **dict.fromkeys(ONES, 1),
    **dict.fromkeys(("slack", "min_prompt", "timeout", "backoff"), 0),
    "answer_tokens": 2,
}
"""The least that an argument may be, by its name; commands have some of them."""


def add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server and results")
    group.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="base URL of the server's API (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="the served model (default: the server's first)")
    group.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="where results are written"
    )
    group.add_argument(
        "--note",
        default="",
        metavar="TEXT",
        help="note for the report, such as the server's machine and flags",
    )


def add_real_texts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions on real text")
    group.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of the prompts in tokens of the served model, at most; its server's /tokenize counts them "
        f"(default: {TOKENS})",
    )
    group.add_argument(
        "--form",
        choices=FORMS,
        help="chat: by the model's chat template; plain: as a text to complete (default: chat)",
    )
    sizes = ", ".join(f"{name} {task.size} ({task.counts})" for name, task in TASKS.items())
    group.add_argument(
        "--difficulty",
        type=_size,
        nargs="+",
        metavar="TASK=N",
        help=f"how hard a task is, in what it counts (default: {sizes})",
    )


def check_real_texts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in defaults, and refuse what cannot be made."""
    arguments.tokens = list(dict.fromkeys(arguments.tokens or [TOKENS]))
    arguments.form = arguments.form or FORMS[0]
    arguments.difficulty = dict(arguments.difficulty or ())
    if any(tokens < 1 for tokens in arguments.tokens):
        parser.error("--tokens must be positive")
    for name, size in arguments.difficulty.items():
        if name not in TASKS or size not in TASKS[name].sizes:
            parser.error(
                f"--difficulty {name}={size}: "
                + (f"choose from {', '.join(TASKS)}" if name not in TASKS else f"{TASKS[name].says_sizes()}")
            )


def check_tasks(parser: argparse.ArgumentParser, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Tasks without doubles, all if none are given; unknown ones are refused."""
    found = list(dict.fromkeys(asked or known))
    if unknown := [task for task in found if task not in known]:
        parser.error(f"--tasks: unknown {', '.join(unknown)} (choose from {', '.join(known)})")
    return found


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not size.isdecimal():
        raise argparse.ArgumentTypeError(f"must be TASK=N, got {text}")
    return name, int(size)


def add_plain(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers without vllm-kvevict")
    group.add_argument(
        "--plain",
        action="store_true",
        help="measure a server without vllm-kvevict: send no kv_* fields and ask each question once; --policies, "
        "--budgets and --scopes do not apply",
    )
    group.add_argument(
        "--label",
        default="plain",
        metavar="NAME",
        help="name of a --plain server in the report (default: %(default)s); full makes it the reference",
    )


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Policies, budgets and scopes."""
    group = parser.add_argument_group("eviction")
    group.add_argument(
        "--policies",
        nargs="+",
        type=parse_policy,
        default=list(POLICIES),
        metavar="POLICY",
        help=f"policies to compare, each as {GRAMMAR}, such as ada-snapkv:kernel=31,rows=max; full is measured once, "
        "without a budget; a NOTE gives the policy a line of its own in the report, such as kvzip@chunk for a server "
        f"with other parameters (default: {' '.join(POLICIES)})",
    )
    group.add_argument(
        "--budgets",
        type=parse_budget,
        nargs="+",
        default=list(BUDGETS),
        metavar="X",
        help="shares of the prompt in (0, 1], or tokens per KV head above 1 (default: "
        f"{' '.join(f'{budget:g}' for budget in BUDGETS)})",
    )
    group.add_argument(
        "--scopes",
        nargs="+",
        choices=SCOPES,
        default=["prompt"],
        help="prompt: the policy sees the question; prefix: it sees only what comes before, which is found with the "
        "server's /tokenize; turns: the same, and each turn of a chat is evicted on its own, on a server with that "
        "scope (default: prompt)",
    )
    add_whole(
        group,
        "--min-prompt",
        256,
        "the server's min_prompt: results of shorter prompts are marked as kept whole",
    )


def add_patience(parser: argparse.ArgumentParser, concurrency: int = 8) -> None:
    group = parser.add_argument_group("requests")
    add_whole(group, "--concurrency", concurrency, "requests in flight at once")
    add_seconds(group, "--timeout", 600, "seconds that an answer may take")
    add_whole(group, "--tries", 5, "attempts per request, if the server fails or cannot be reached")
    add_seconds(group, "--backoff", 1.0, "seconds before the second attempt, doubled for each further one")


def add_whole(group: argparse._ArgumentGroup, name: str, default: int, about: str) -> None:
    """An option that takes a whole number; its help says the default."""
    group.add_argument(name, type=int, default=default, metavar="N", help=f"{about} (default: %(default)s)")


def add_seconds(group: argparse._ArgumentGroup, name: str, default: float, about: str) -> None:
    """An option that takes seconds; its help says the default."""
    group.add_argument(name, type=float, default=default, metavar="S", help=f"{about} (default: %(default)s)")


def parse_budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value <= 1 or (value > 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"must be in (0, 1], or a whole number above 1, got {text}")
    return value


def parse_policy(text: str) -> str:
    """A policy with parameters, as the report names it."""
    try:
        return str(parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse numbers below their bound; those that were not given are None."""
    for name, bound in LEAST.items():
        value = getattr(arguments, name, None)
        if value is not None and value < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}")
