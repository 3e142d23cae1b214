"""The loads of the records of `throughput` and `reasoning`: one side with eviction beside stock vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.measure import Estimate

THROUGHPUT, SWEEP, REASONING = "throughput-", "throughput-sweep-", "reasoning-"
"""How the names of these records begin."""


@dataclass(frozen=True)
class Cell:
    """One side with eviction beside stock vLLM, under one load.

    Attributes:
        name: of the scenario, or of the sweep and its value.
        side: the one with eviction.
        scenario: the load and its memory, as recorded.
        rounds: the runs of each turn, as recorded.
        ratios: by measure.
        level: of the processor; None in records of before it was recorded.
    """

    name: str
    side: str
    scenario: dict[str, Any]
    rounds: list[dict[str, Any]]
    ratios: dict[str, Estimate]
    level: str | None = None

    def typical(self, turn: str, what: str) -> float:
        """Median of a figure of a turn over the rounds."""
        return median(one[turn][what] for one in self.rounds)

    @property
    def load(self) -> str:
        """The load in words."""
        of = self.scenario
        answers = f", answers to {of['decode_budget']}" if "decode_budget" in of else ""
        ranks = f", TP {of['tensor']} x PP {of['pipeline']}" if of["tensor"] * of["pipeline"] > 1 else ""
        return (
            f"{of['requests']} x ({of['input_len']} in, {of['output_len']} out), memory for {of['pool']}, "
            f"{of['policy']}{answers}{ranks}, {dtype(of)}{f', {self.level}' if self.level else ''}"
        )


def dtype(settings: dict[str, Any]) -> str:
    """In which something was measured; older records do not say it and were all made in bfloat16."""
    return settings.get("dtype", "bfloat16")


def scenarios(records: dict[str, dict[str, Any]]) -> list[Cell]:
    """The cells of all scenarios."""
    found: list[Cell] = []
    for name, content in records.items():
        if name.startswith(THROUGHPUT) and not name.startswith(SWEEP):
            found += cells(name.removeprefix(THROUGHPUT), content["results"], content.get("level"))
        elif name.startswith(REASONING):
            for results in content["results"]["scenarios"].values():
                found += cells(name, results, content.get("level"))
    return found


def sweeps(records: dict[str, dict[str, Any]]) -> dict[str, list[Cell]]:
    """The cells of each sweep by the name of its file, in its order."""
    return {
        name: [
            cell
            for one in content["results"]["values"]
            for cell in cells(f"{content['results']['sweep']} {one['value']}", one, content.get("level"))
        ]
        for name, content in records.items()
        if name.startswith(SWEEP)
    }


def cells(name: str, content: dict[str, Any], level: str | None = None) -> Iterator[Cell]:
    """One cell for each side with eviction."""
    for side, measures in content["ratios"].items():
        reached = {measure: Estimate(**value) for measure, value in measures.items()}
        yield Cell(name, side, content["scenario"], content["rounds"], reached, level)
