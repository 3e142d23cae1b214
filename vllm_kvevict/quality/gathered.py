"""Everything that the report of a folder of results is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvevict.quality.decoding_report import DecodingMeasures
from vllm_kvevict.quality.fidelity_report import Measures
from vllm_kvevict.quality.results import Column, Result, Settings
from vllm_kvevict.quality.scores import Scores


@dataclass(frozen=True)
class Report:
    """Everything that the text is made from.

    Attributes:
        title: of the text.
        settings, runs: see write_settings.
        results: all.
        full: the full cache's mean scores by task.
        scores: of samples with a random depth, or of all if there are no others, of tasks that the model can do.
        needles: of samples with a given depth, None if there are none.
        budget: of the tables by task and of the maps, None if there are no budgets.
        kept: shares by column, [layers, KV heads].
        fidelity, decoding: None if that was not measured.
    """

    title: str
    settings: Settings
    runs: Sequence[Mapping[str, Any]]
    results: Sequence[Result]
    full: Mapping[str, float]
    scores: Scores
    needles: Scores | None
    budget: float | None
    kept: Mapping[Column, np.ndarray]
    fidelity: Measures | None
    decoding: DecodingMeasures | None = None
