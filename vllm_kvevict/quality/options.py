"""The options of ``vllm-kvevict quality``."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_kvevict.policy_list import GRAMMAR, parse
from vllm_kvevict.quality import chats, checkpoint, decoding_tasks, questions
from vllm_kvevict.quality.prompts import SHAPES
from vllm_kvevict.quality.results import FULL, SCOPES, TURNS
from vllm_kvevict.quality.tasks import ALONE, TASKS, most_questions

PROGRAM = "python -m vllm_kvevict.quality"
BUDGETS_BY_HEAD = ("ada-snapkv", "ada-pyramid", "lava", "lava-uniform")
POLICIES = ["full", "streaming-llm", "snapkv", "pyramidkv", *BUDGETS_BY_HEAD, "cake"]
"""Measured by default."""
BUDGETS = (0.05, 0.1, 0.2, 0.4)
LENGTH, TOKENS, FORMS = 1024, 1024, ("chat", "plain")
REAL_TASKS = {"text": questions.TASKS, "chats": chats.TASKS}
FAMILIES: dict[str, Iterable[str]] = {"words": TASKS, **REAL_TASKS}
"""Tasks by family."""
SIZED = {**questions.TASKS, **chats.TASKS}
"""All on real text that have a right answer."""
FIDELITY_TASKS = [*questions.OPEN_TASKS, *questions.TASKS]
OF_WORDS, OF_TEXT = ("lengths", "depths", "instruct"), ("tokens", "form", "difficulty")
"""Options that apply to one family of questions only."""
AT_LEAST_ONE = ("samples", "questions", "top", "concurrency", "tries", "lengths", "tokens", "interval")
AT_LEAST_ZERO = ("slack", "min_prompt", "timeout", "backoff")
LEAST = {**dict.fromkeys(AT_LEAST_ONE, 1), **dict.fromkeys(AT_LEAST_ZERO, 0), "answer_tokens": 2}
"""The least that an option may be; commands have some of them."""

DESCRIPTION = (
    "Measures how eviction changes the quality of a server's answers: ask it with run, fidelity or answers, then write "
    "a report. An interrupted command continues when it is started again. Examples: docs/MEASURING-QUALITY.md."
)
ABOUT = {
    "run": "Asks a running server with an OpenAI-compatible API questions with known answers. Start it with "
    "--kv-eviction full, without --kv-eviction-config.scope prefix, and with --kv-eviction-config.policies all for "
    "h2o, kvzip, compactor or expected-attention; for --scopes turns, with a policy and --kv-eviction-config.scope "
    "turns. The environment variable OPENAI_API_KEY is sent as the API key.",
    "fidelity": "Measures how far answers change: the full cache of a running server answers greedily, and each answer "
    "is scored token by token on the compressed caches. Start the server as for run, with --dtype float32 for results "
    "that are to be published, and with --enable-scale-out for --scopes turns.",
    "answers": "Measures how far long answers change that are evicted while they are written. Start the server with "
    "--kv-eviction full, --kv-decode-budget D, --kv-eviction-config.decode_policy POLICY and --dtype float32; run the "
    "command again for each server with another policy.",
    "report": "Writes a Markdown report of a folder of results, and its plots.",
    "checkpoint": f"Fetches {checkpoint.NAME} ({checkpoint.LICENCE}), a small real model to measure with, and prints "
    "its folder. It is fetched once, and kept in ${XDG_CACHE_HOME:-~/.cache}/vllm-kvevict or in the folder that the "
    f"environment variable {checkpoint.CACHE} names. Needs the extra `bench`.",
}


def _one(metavar: str, about: str, default: Any = None, kind: Any = None, **more: Any) -> dict[str, Any]:
    """An option with one value, of the type of its default if no other is given."""
    kind = kind or (str if default is None else type(default))
    shown = "" if default in (None, "") else " (default: %(default)s)"
    return {"metavar": metavar, "help": about + shown, "default": default, "type": kind, **more}


def _several(metavar: str, about: str, kind: Any = str, default: Any = None) -> dict[str, Any]:
    """An option with values; ``about`` says the default."""
    return {"metavar": metavar, "help": about, "default": default, "type": kind, "nargs": "+"}


def _flag(about: str) -> dict[str, Any]:
    return {"help": about, "action": "store_true"}


def parse_budget(text: str) -> float:
    """A share, or a whole number of tokens."""
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


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not size.isdecimal():
        raise argparse.ArgumentTypeError(f"must be TASK=N, got {text}")
    return name, int(size)


def _check_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse numbers below their bound."""
    for name, bound in LEAST.items():
        value = getattr(arguments, name, None)
        if value is not None and min(value if isinstance(value, list) else [value]) < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}")


def _check_run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be asked, and fill in what depends on other options."""
    real = arguments.family in REAL_TASKS
    wrong = [f"--{name}" for name in (OF_WORDS if real else OF_TEXT) if getattr(arguments, name)]
    if real and arguments.questions > 1:
        wrong.append("--questions")
    if wrong:
        families = "words" if real else " or ".join(REAL_TASKS)
        parser.error(f"{', '.join(wrong)} can be combined with --family {families} only")
    if real:
        _check_real_texts(parser, arguments)
        arguments.tasks = _known(parser, arguments.tasks, list(REAL_TASKS[arguments.family]))
    else:
        arguments.form = "chat"
        _check_words(parser, arguments)
    if {"prompt", TURNS} <= set(arguments.scopes):
        parser.error("--scopes prompt and turns need servers of their own: measure one after the other")


def _check_words(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """The same for texts of random words; some tasks cannot share a text."""
    several = arguments.questions > 1
    asked = arguments.tasks or [task for task in TASKS if not several or task not in ALONE]
    arguments.tasks = _known(parser, asked, list(TASKS))
    alone = [task for task in arguments.tasks if task in ALONE]
    if several and alone:
        parser.error(
            f"--tasks {' '.join(alone)} asks about the whole text, so it cannot be combined with --questions above 1"
        )
    if arguments.questions > most_questions():
        parser.error(f"--questions must be at most {most_questions()}: there are no more names")
    if several and arguments.depths:
        parser.error("--questions above 1 cannot be combined with --depths")
    if any(not 0 <= depth <= 1 for depth in arguments.depths or ()):
        parser.error("--depths must lie between 0 and 1")
    arguments.depths = list(dict.fromkeys(arguments.depths or [None]))
    arguments.lengths = list(dict.fromkeys(arguments.lengths or [LENGTH]))


def _check_real_texts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in defaults, and refuse what cannot be made."""
    arguments.tokens = list(dict.fromkeys(arguments.tokens or [TOKENS]))
    arguments.form = arguments.form or FORMS[0]
    arguments.difficulty = dict(arguments.difficulty or ())
    for name, size in arguments.difficulty.items():
        if name not in SIZED or size not in SIZED[name].sizes:
            known = SIZED[name].says_sizes() if name in SIZED else f"choose from {', '.join(SIZED)}"
            parser.error(f"--difficulty {name}={size}: {known}")


def _check_fidelity(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured, and fill in defaults."""
    if arguments.prompts and (wrong := [f"--{n}" for n in ("tasks", *OF_TEXT) if getattr(arguments, n)]):
        parser.error(f"{', '.join(wrong)} cannot be combined with --prompts")
    _check_real_texts(parser, arguments)
    arguments.tasks = _known(parser, arguments.tasks, FIDELITY_TASKS)
    arguments.policies = list(dict.fromkeys([FULL, *arguments.policies]))  # its floor belongs to every run


def _check_answers(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """The same."""
    if arguments.prompts and arguments.tasks:
        parser.error("--tasks cannot be combined with --prompts")
    arguments.tasks = _known(parser, arguments.tasks, list(decoding_tasks.TASKS))
    if min(arguments.budgets) < 1:
        parser.error("--budgets must be at least 1")


def _known(parser: argparse.ArgumentParser, asked: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Tasks without doubles, all if none are given; unknown ones are refused."""
    found = list(dict.fromkeys(asked or known))
    if unknown := [task for task in found if task not in known]:
        parser.error(f"--tasks: unknown {', '.join(unknown)} (choose from {', '.join(known)})")
    return found


CHECKS = {"run": _check_run, "fidelity": _check_fidelity, "answers": _check_answers}


KINDS = "; ".join(f"of {family} {', '.join(tasks)}" for family, tasks in FAMILIES.items())
SIZES = ", ".join(f"{name} {task.size} ({task.counts})" for name, task in SIZED.items())
OPTIONS: dict[str, dict[str, Any]] = {
    "url": _one("URL", "base URL of the server's API", "http://localhost:8000/v1"),
    "model": _one("NAME", "the served model (default: the server's first)"),
    "output": _one("FOLDER", "where results are written", kind=Path, required=True),
    "note": _one("TEXT", "for the report, such as the server's machine and flags", ""),
    "plain": _flag("the server is not vllm-kvevict's: send no kv_* fields, and ask each question once"),
    "label": _one("NAME", "what the report calls a --plain server; full makes it the reference", "plain"),
    "family": {
        "choices": FAMILIES,
        "default": "words",
        "help": "words: texts of random words, for the small needle model and models alike; text: real text, prose "
        "and code that come with Python; chats: such prose in chats of several turns (default: %(default)s)",
    },
    "prompts": _one("FILE", f"your own, JSON lines: {SHAPES}; a chat may be a whole request (default: ours)"),
    "run tasks": _several("TASK", f"kinds of questions: {KINDS} (default: all of the family)"),
    "fidelity tasks": _several("TASK", f"kinds of real text: {', '.join(FIDELITY_TASKS)} (default: all)"),
    "answers tasks": _several(
        "TASK",
        "writing: stories, essays and letters; recall: repeating facts from the answer's beginning (default: both)",
    ),
    "samples": _one("N", "of each task and length", 4),
    "run samples": _one("N", "of each task, length and depth; with --questions, texts of each length", 50),
    "seed": _one("N", "of the samples: the same seed gives the same ones", 0),
    "instruct": _flag("put an instruction before the text, for models not trained on these texts"),
    "slack": _one("N", "tokens that a reply may have on top of three per word of the answer", 8),
    "lengths": _several("N", f"of texts of random words, in words and full stops (default: {LENGTH})", int),
    "depths": _several(
        "X",
        "where the needle is in random words: 0 is the beginning of the text, 1 the end; with --tasks single the "
        "report has a heat map of depths and lengths (default: at random)",
        float,
    ),
    "questions": _one("N", "about each text of random words, each a request; the tasks take turns", 1),
    "tokens": _several("N", f"tokens that a prompt on real text has at most (default: {TOKENS})", int),
    "form": {"choices": FORMS, "help": "of prompts on real text: a chat, or plain text (default: chat)"},
    "difficulty": _several("TASK=N", f"of tasks on real text, by default {SIZES}", _size),
    "answer-tokens": _one("N", "length of the full cache's answers, at most", 32),
    "temperature": _one("X", "at which answers are written", 0.8),
    "top": _one("N", "tokens whose log-probabilities are compared, at most the server's --max-logprobs", 20),
    "policies": _several(
        "POLICY",
        f"each as {GRAMMAR}, such as ada-snapkv:kernel=31; full is measured once, without a budget; lookahead=N among "
        "the parameters evicts behind N tokens of the answer; a NOTE tells servers with other parameters apart, such "
        f"as kvzip@chunk (default: {' '.join(POLICIES)})",
        parse_policy,
        POLICIES,
    ),
    "policy": _one("POLICY", "the server's decode_policy, as the report is to name it", required=True),
    "budgets": _several(
        "X",
        f"shares of the prompt, or tokens per KV head above 1 (default: {' '.join(map(str, BUDGETS))})",
        parse_budget,
        list(BUDGETS),
    ),
    "answers budgets": _several("D", "tokens of an answer that a KV head keeps (default: 256)", int, [256]),
    "interval": _one("I", "the server's decode_interval, if it was started with one", kind=int),
    "scopes": {
        "nargs": "+",
        "choices": SCOPES,
        "default": ["prompt"],
        "help": "prompt: the policy sees the question; prefix: it sees only what comes before, which is found with "
        "the server's /tokenize; turns: the same, and each turn of a chat is evicted on its own, on a server with "
        "that scope (default: prompt)",
    },
    "min-prompt": _one("N", "the server's min_prompt: shorter prompts are marked as kept whole", 256),
    "concurrency": _one("N", "samples in flight at once, each with one request at a time", 8),
    "timeout": _one("S", "seconds that an answer may take", 600.0),
    "tries": _one("N", "attempts per request, if the server fails or cannot be reached", 5),
    "backoff": _one("S", "seconds before the second attempt, doubled for each further one", 1.0),
    "report output": _one("FILE", "the Markdown file (default: FOLDER/report.md)", kind=Path),
    "title": _one("TITLE", "of the report", "Quality under eviction"),
    "budget": _one("X", "of tables by task and of maps, or the nearest that was measured", 0.2, parse_budget),
}
"""What argparse knows of each option, by name; of those that differ by command, also by command and name."""

ALL = "url model output note concurrency timeout tries backoff tasks samples seed"
TEXTS = "tokens form difficulty policies budgets scopes min-prompt"
OPTIONS_OF = {
    "run": f"{ALL} {TEXTS} plain label family instruct slack lengths depths questions",
    "fidelity": f"{ALL} {TEXTS} prompts answer-tokens top",
    "answers": f"{ALL} prompts answer-tokens top temperature policy budgets interval",
    "report": "output title budget",
    "checkpoint": "",
}
"""Options of each command."""
FIXED = {"instruct": False, "slack": 0, "form": "chat", "min_prompt": 0}
"""What `answers` has no options for."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"prompts": None},
    "fidelity": {"instruct": False, "slack": 0, "concurrency": 1},
    "answers": {**FIXED, "samples": 20, "answer_tokens": 1024, "concurrency": 4},
}
"""Where they differ from the others', and what a command has no option for."""


def parse_arguments(words: Sequence[str], program: str = PROGRAM) -> argparse.Namespace:
    """Read the command line; what depends on other options is filled in."""
    parser = argparse.ArgumentParser(program, description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    of_command = {}
    for command, about in ABOUT.items():
        one = of_command[command] = commands.add_parser(
            command, description=about, help=about.partition(". ")[0]
        )
        for name in OPTIONS_OF[command].split():
            one.add_argument(f"--{name}", **(OPTIONS.get(f"{command} {name}") or OPTIONS[name]))
        one.set_defaults(**DEFAULTS.get(command, {}))
    of_command["report"].add_argument("folder", type=Path, metavar="FOLDER", help="that has the results")
    arguments = parser.parse_args(words)
    arguments.typed = ["vllm-kvevict", "quality", *words]
    if check := CHECKS.get(arguments.command):
        _check_least(of_command[arguments.command], arguments)
        check(of_command[arguments.command], arguments)
    return arguments
