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
PLAIN = ("yarn_mistral", "rwkv")
"""Prompts that are completed without a chat template."""
FIELDS = ("context", "input", "answer")
OPTIONS = "ABCD"

MAX_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
    "longbook_qa_chn": 40,
    "longdialogue_qa_eng": 40,
    "math_find": 3,
    "math_calc": 30000,
    "code_run": 5,
    "code_debug": 5,
}
METRICS: dict[str, Metric] = {
    "passkey": choices.first_integer,
    "number_string": choices.first_integer,
    "kv_retrieval": choices.contains_word,
    "longbook_sum_eng": partial(metrics.best, pair=metrics.rouge_l_sum),
    "longbook_choice_eng": choices.choice,
    "longbook_qa_eng": partial(metrics.best, pair=metrics.qa_f1),
    "longbook_qa_chn": partial(metrics.best, pair=metrics.character_f1),
    "longdialogue_qa_eng": choices.names_one,
    "math_find": choices.first_number,
    "math_calc": choices.leading_numbers,
    "code_run": choices.last_integer,
    "code_debug": choices.faulty_function,
}
CHOICES = ("longbook_choice_eng", "code_debug")


def load(
    folder: Path | None,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    prompts: Path | None = None,
    templates: str = TEMPLATES,
) -> list[SuiteSample]:
    """The samples; see `vllm_kvevict.quality.suites.load`."""
    config = prompts or folder
    if config is None:
        raise SuiteError("InfiniteBench without its folder needs --prompts FOLDER: where prompt.py is")
    texts = read_templates(config, templates)
    if folder is None:
        names = choose(tasks, tuple(METRICS), "InfiniteBench")
        sources = {task: hub(HUB, split=task, features=features(), limit=limit) for task in names}
    else:
        places = [folder / "data", folder / "data" / "InfiniteBench", folder]
        files = data_files(tasks, tuple(METRICS), places, "InfiniteBench")
        sources = {task: records(path, FIELDS, limit) for task, path in files.items()}
    require(texts, sources, f"{templates}_templates of InfiniteBench")
    return [
        sample for task, source in sources.items() for sample in make(task, source, texts[task], templates)
    ]


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


def read_templates(folder: Path, name: str) -> dict[str, str]:
    """The dictionary ``<name>_templates`` of the suite's prompt.py.

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
    if name not in found:
        raise SuiteError(f"{path} has no {name}_templates; it has: {', '.join(found)}")
    entries = found[name]
    try:
        return {
            ast.literal_eval(key): text(value)
            for key, value in zip(entries.keys, entries.values, strict=True)
            if key is not None
        }
    except ValueError:
        raise SuiteError(f"{path}: {name}_templates is not a dictionary of texts") from None


def text(node: ast.expr) -> str:
    """A text of the source, or several joined with ``+``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    value = ast.literal_eval(node)
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def make(
    task: str, source: Iterator[tuple[str, Record]], template: str, templates: str
) -> Iterator[SuiteSample]:
    """The samples of one task."""
    metric = METRICS[task]
    if templates == "gpt4" and task == "math_calc":
        # That model was given the expression alone, and repeats the first number before its results.
        template, metric = "{context}", partial(choices.leading_numbers, skip=1)
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
            MAX_TOKENS[task],
            answers,
            metric,
            chat=templates not in PLAIN,
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
