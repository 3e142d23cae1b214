"""The report's comparison of this version with another one, by loads that were served by both."""

from collections.abc import Sequence

from benchmarks.harness.cells import Cell
from benchmarks.harness.scenarios import OVER_BASELINE, of_baseline
from vllm_kvevict.quality.tables import table

COLUMNS = ("scenario", "load", "side", "baseline", "tokens/s", "baseline's", OVER_BASELINE)


def baseline_section(found: Sequence[Cell]) -> list[str]:
    """One row for each load that a baseline served, too; nothing without one."""
    rows = [_row(cell) for cell in found if OVER_BASELINE in cell.ratios]
    if not rows:
        return []
    return ["## Compared with other versions of this package", "", *table(COLUMNS, rows, left=4)]


def _row(cell: Cell) -> tuple[str, ...]:
    baseline = cell.scenario["baseline"]
    return (
        *(cell.name, cell.load, cell.side),
        baseline["commit"] or baseline["versions"]["vllm-kvevict"],
        *(f"{cell.typical(turn, 'tokens_per_second'):.1f}" for turn in (cell.side, of_baseline(cell.side))),
        str(cell.ratios[OVER_BASELINE]),
    )
