"""Public long-context suites, read from the user's own copy: LongBench, RULER and InfiniteBench.

Nothing of a suite is contained here: texts and prompts come from its files, or its texts from the ``datasets`` hub.
What is computed here are the scores, by each suite's own definition (see `metrics` and `choices`).
"""

from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.quality.suites import infinitebench, longbench, ruler
from vllm_kvevict.quality.suites.sample import SuiteError, SuiteSample, truncate_middle

__all__ = ["SUITES", "SuiteError", "SuiteSample", "load", "truncate_middle"]

SUITES = ("longbench", "ruler", "infinitebench")


def load(
    name: str,
    folder: Path | str | None,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    prompts: Path | str | None = None,
    extended: bool = False,
    split: str = "validation",
    templates: str = infinitebench.TEMPLATES,
) -> list[SuiteSample]:
    """The samples of a suite, task by task.

    Args:
        name: one of SUITES.
        folder: the suite's checkout or download; None reads the texts through ``datasets``, which may download them.
        tasks: which ones, by the suite's names; None for all that the folder holds.
        limit: the most samples of each task, from its beginning.
        prompts: LongBench and InfiniteBench: the folder with the suite's prompts, where `folder` does not have them.
        extended: LongBench: the texts of LongBench-E.
        split: RULER: the name of the data files, without their ending.
        templates: InfiniteBench: whose prompts, such as ``yarn_mistral`` or ``gpt4``.

    Raises:
        SuiteError: what is missing or malformed, with its file and line.
    """
    source = None if folder is None else Path(folder)
    config = None if prompts is None else Path(prompts)
    if source is not None and not source.is_dir():
        raise SuiteError(f"no folder {source}: {name} is read from a checkout or download of it")
    match name:
        case "longbench":
            return longbench.load(source, tasks=tasks, limit=limit, prompts=config, extended=extended)
        case "ruler":
            return ruler.load(source, tasks=tasks, limit=limit, split=split)
        case "infinitebench":
            return infinitebench.load(source, tasks=tasks, limit=limit, prompts=config, templates=templates)
    raise SuiteError(f"unknown suite {name!r}; one of: {', '.join(SUITES)}")
