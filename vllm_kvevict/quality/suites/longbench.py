"""LongBench (Bai et al. 2024), in the format of its repository.

A checkout has ``LongBench/config/dataset2prompt.json`` and ``dataset2maxlen.json`` (``config/`` in older ones); the
texts, ``data/<task>.jsonl``, are a separate download. Few-shot and code tasks are completed without a chat template.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_kvevict.quality.suites import metrics
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

HUB = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "all_classes")

METRICS: dict[str, metrics.Pair] = {
    "narrativeqa": metrics.qa_f1,
    "qasper": metrics.qa_f1,
    "multifieldqa_en": metrics.qa_f1,
    "multifieldqa_zh": metrics.qa_f1_zh,
    "hotpotqa": metrics.qa_f1,
    "2wikimqa": metrics.qa_f1,
    "musique": metrics.qa_f1,
    "dureader": metrics.rouge_l_zh,
    "gov_report": metrics.rouge_l,
    "qmsum": metrics.rouge_l,
    "multi_news": metrics.rouge_l,
    "vcsum": metrics.rouge_l_zh,
    "trec": metrics.classification,
    "triviaqa": metrics.qa_f1,
    "samsum": metrics.rouge_l,
    "lsht": metrics.classification,
    "passage_count": metrics.count,
    "passage_retrieval_en": metrics.retrieval,
    "passage_retrieval_zh": metrics.retrieval_zh,
    "lcc": metrics.code_similarity,
    "repobench-p": metrics.code_similarity,
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Of a reply, only its first line counts: the model would go on with further examples."""
PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Without a chat template."""


def load(
    folder: Path | None, tasks: Sequence[str] | None, limit: int | None, prompts: Path | None
) -> list[SuiteSample]:
    """The samples; see `vllm_kvevict.quality.suites.load`."""
    config = prompts or folder
    if config is None:
        raise SuiteError("LongBench without its folder needs --prompts FOLDER: where dataset2prompt.json is")
    templates, lengths = (read_config(config, name) for name in ("dataset2prompt", "dataset2maxlen"))
    if folder is None:
        hub_package()
        names = choose(tasks, tuple(METRICS), "LongBench")
        sources = {task: hub(HUB, task, split="test", limit=limit) for task in names}
    else:
        places = [folder / "LongBench" / "data", folder / "data", folder]
        files = data_files(tasks, tuple(METRICS), places, "LongBench")
        sources = {task: records(path, FIELDS, limit) for task, path in files.items()}
    for task in sources:
        if METRICS[task] in (metrics.qa_f1_zh, metrics.rouge_l_zh):
            metrics.chinese_words()
        for settings, name in ((templates, "dataset2prompt"), (lengths, "dataset2maxlen")):
            require(settings, [task], f"{name}.json of LongBench")
    return [
        sample
        for task, source in sources.items()
        for sample in make(task, source, templates[task], lengths[task])
    ]


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A settings file of the suite.

    Raises:
        SuiteError: it is not there, or not a JSON object.
    """
    places = [folder / "LongBench" / "config", folder / "config", folder]
    path = first_existing(place / f"{name}.json" for place in places)
    if path is None:
        raise SuiteError(
            f"LongBench: no {name}.json in {folder} or its config folder; "
            "give the folder that has it with --prompts FOLDER"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SuiteError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise SuiteError(f"{path}: not a JSON object")
    return content


def make(
    task: str, source: Iterator[tuple[str, Record]], template: str, max_tokens: int
) -> Iterator[SuiteSample]:
    """The samples of one task."""
    for index, (where, record) in enumerate(source):
        require(record, FIELDS, where)
        answers = record["answers"]
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise SuiteError(f"{where}: field 'answers' is not a list of texts")
        context, question = fill(template, record, where)
        yield SuiteSample(
            "longbench",
            task,
            index,
            context,
            question,
            max_tokens,
            tuple(answers),
            metric(task, record, where),
            chat=task not in PLAIN,
        )


def metric(task: str, record: Record, where: str) -> Metric:
    """The best score over all answers."""
    pair = METRICS[task]
    if pair is metrics.classification:
        if not record["all_classes"]:
            raise SuiteError(f"{where}: field 'all_classes' is empty, which {task} is scored with")
        pair = partial(metrics.classification, classes=tuple(record["all_classes"]))
    return partial(metrics.best, pair=pair, first_line=task in FIRST_LINE)
