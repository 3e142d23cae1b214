"""InfiniteBench (Zhang et al. 2024), in the format of its repository.

The texts are ``<task>.jsonl`` in the checkout's ``data`` or in a download; the prompts are dictionaries in its
``src/prompt.py``, one for each model that the suite was first run with. That file is parsed, not run.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_kvevict.quality.suites import choices, metrics
from vllm_kvevict.quality.suites.sample import (
    Metric,
    Record,
    SuiteError,
    SuiteSample,
    choose,
    data_files,
    fill,
    first_existing,
    hub,
    hub_package,
    records,
    require,
)

HUB = "xinrongzhang2022/InfiniteBench"
TEMPLATES = "yarn_mistral"
"""The prompts for a model that is run locally; they end where the answer begins and need no chat template."""
FIELDS = ("context", "input", "answer")
OPTIONS = "ABCD"

TASKS: dict[str, tuple[int, Metric]] = {
    "passkey": (6, choices.first_integer),
    "number_string": (12, choices.first_integer),
    "kv_retrieval": (50, choices.contains_word),
    "longbook_sum_eng": (1200, partial(metrics.best, pair=metrics.rouge_l_sum)),
    "longbook_choice_eng": (40, choices.choice),
    "longbook_qa_eng": (40, partial(metrics.best, pair=metrics.qa_f1)),
    "longbook_qa_chn": (40, partial(metrics.best, pair=metrics.character_f1)),
    "longdialogue_qa_eng": (40, choices.names_one),
    "math_find": (3, choices.first_number),
    "math_calc": (30000, choices.leading_numbers),
    "code_run": (5, choices.last_integer),
    "code_debug": (5, choices.faulty_function),
}
"""By name: the most tokens of a reply, and how it is scored."""
CHOICES = ("longbook_choice_eng", "code_debug")


def load(
    folder: Path | None, tasks: Sequence[str] | None, limit: int | None, prompts: Path | None
) -> list[SuiteSample]:
    """The samples; see `vllm_kvevict.quality.suites.load`."""
    config = prompts or folder
    if config is None:
        raise SuiteError("InfiniteBench without its folder needs --prompts FOLDER: where prompt.py is")
    texts = read_templates(config)
    if folder is None:
        names = choose(tasks, tuple(TASKS), "InfiniteBench")
        sources = {task: hub(HUB, split=task, features=features(), limit=limit) for task in names}
    else:
        places = [folder / "data", folder / "data" / "InfiniteBench", folder]
        files = data_files(tasks, tuple(TASKS), places, "InfiniteBench")
        sources = {task: records(path, FIELDS, limit) for task, path in files.items()}
    require(texts, sources, f"{TEMPLATES}_templates of InfiniteBench")
    return [sample for task, source in sources.items() for sample in make(task, source, texts[task])]


def features() -> Any:
    """The columns on the hub, where every answer is a list of texts."""
    package = hub_package()
    text = package.Value("string")
    return package.Features(
        {
            "id": package.Value("int64"),
            "context": text,
            "input": text,
            "answer": package.Sequence(text),
            "options": package.Sequence(text),
        }
    )


def read_templates(folder: Path) -> dict[str, str]:
    """The dictionary of these prompts in the suite's prompt.py.

    Raises:
        SuiteError: no file, no such dictionary, or one that is more than texts.
    """
    path = first_existing([folder / "src" / "prompt.py", folder / "prompt.py"])
    if path is None:
        raise SuiteError(
            f"InfiniteBench: no prompt.py in {folder} or its src; give the folder that has it with --prompts FOLDER"
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise SuiteError(f"{path}, line {error.lineno}: not Python ({error.msg})") from None
    found = {
        target.id.removesuffix("_templates"): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if TEMPLATES not in found:
        raise SuiteError(f"{path} has no {TEMPLATES}_templates; it has: {', '.join(found)}")
    entries = found[TEMPLATES]
    try:
        return {
            ast.literal_eval(key): text(value)
            for key, value in zip(entries.keys, entries.values, strict=True)
            if key is not None
        }
    except ValueError:
        raise SuiteError(f"{path}: {TEMPLATES}_templates is not a dictionary of texts") from None


def text(node: ast.expr) -> str:
    """A text of the source, or several joined with ``+``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    value = ast.literal_eval(node)
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def make(task: str, source: Iterator[tuple[str, Record]], template: str) -> Iterator[SuiteSample]:
    """The samples of one task."""
    max_tokens, metric = TASKS[task]
    for index, (where, record) in enumerate(source):
        require(record, FIELDS, where)
        context, question = fill(template, values(task, record, where), where)
        answers = right_answers(task, record, where)
        yield SuiteSample(
            "infinitebench",
            task,
            index,
            context,
            question,
            max_tokens,
            answers,
            metric,
            chat=False,
        )


def values(task: str, record: Record, where: str) -> Mapping[str, Any]:
    """What a template may use of a record."""
    fields = {**record, "question": record.get("question", record["input"])}
    if task in CHOICES:
        for letter, option in zip(OPTIONS, four_options(record, where), strict=True):
            fields[f"OPTION_{letter}"] = option
    if task == "code_run":
        call = search(r"func_[0-9]+\(-?[0-9]+\)", record, where)
        fields |= {"func_call": call, "func": call.split("(")[0]}
    if task == "math_find":
        number = search("The .+ of", record, where).lower().removesuffix(" of")
        fields["prefix"] = f"What is {number} in the following list?"
    return fields


def search(pattern: str, record: Record, where: str) -> str:
    """What a pattern finds in the question."""
    found = re.search(pattern, record["input"])
    if not found:
        raise SuiteError(f"{where}: field 'input' has nothing like {pattern!r}")
    return found.group()


def four_options(record: Record, where: str) -> list[str]:
    """The options of a choice."""
    options = record.get("options")
    if not isinstance(options, list) or len(options) != len(OPTIONS):
        raise SuiteError(f"{where}: field 'options' is not a list of four")
    return options


def right_answers(task: str, record: Record, where: str) -> tuple[Any, ...]:
    """The answers; of a choice, the option and its letter."""
    answer = record["answer"]
    answers = list(answer) if isinstance(answer, list) else [answer]
    if not answers:
        raise SuiteError(f"{where}: field 'answer' is empty")
    if task in CHOICES and len(answers) == 1:
        options = four_options(record, where)
        if answers[0] not in options:
            raise SuiteError(f"{where}: field 'answer' is none of the options")
        answers.append(OPTIONS[options.index(answers[0])])
    return tuple(answers)
