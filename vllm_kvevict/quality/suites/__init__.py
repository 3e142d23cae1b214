"""Public long-context suites, read from the user's own copy: LongBench, RULER and InfiniteBench.

Nothing of a suite is contained here: texts and prompts come from its files, or its texts from the ``datasets`` hub.
What is computed here are the scores, by each suite's own definition (see `metrics` and `choices`).
"""

from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.quality.suites import infinitebench, longbench, ruler
from vllm_kvevict.quality.suites.sample import SuiteError, SuiteSample

__all__ = ["SUITES", "SuiteError", "SuiteSample", "load"]

SUITES = ("longbench", "ruler", "infinitebench")


def load(
    name: str,
    folder: Path | None,
    *,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    prompts: Path | None = None,
) -> list[SuiteSample]:
    """The samples of a suite, task by task.

    Args:
        name: one of SUITES.
        folder: the suite's checkout or download; None reads the texts through ``datasets``, which may download them.
        tasks: which ones, by the suite's names; None for all that the folder holds.
        limit: the most samples of each task, from its beginning.
        prompts: LongBench and InfiniteBench: the folder with the suite's prompts, where `folder` does not have them.

    Raises:
        SuiteError: what is missing or malformed, with its file and line.
    """
    if folder is not None and not folder.is_dir():
        raise SuiteError(f"no folder {folder}: {name} is read from a checkout or download of it")
    match name:
        case "longbench":
            return longbench.load(folder, tasks, limit, prompts)
        case "ruler":
            return ruler.load(folder, tasks, limit)
        case "infinitebench":
            return infinitebench.load(folder, tasks, limit, prompts)
    raise SuiteError(f"unknown suite {name!r}; one of: {', '.join(SUITES)}")
