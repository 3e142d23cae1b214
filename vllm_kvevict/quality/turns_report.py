"""What the report says of chats that are compressed turn by turn: which turns lose, and what one part would lose."""

from collections.abc import Callable, Sequence

from vllm_kvevict.quality import chats
from vllm_kvevict.quality.cases import TEXT
from vllm_kvevict.quality.results import TURNS, Column, Result
from vllm_kvevict.quality.scores import NONE, Scores, signed
from vllm_kvevict.quality.tables import table

OF_TURNS = f"{TEXT}turns-"
ONE_PART = "prefix"


def turns_section(scores: Scores[Result]) -> list[str]:
    """Both tables; nothing where no chat was compressed turn by turn, or none of them tells a fact in a turn."""
    columns = [column for column in scores.columns if column.scope == TURNS]
    tables = [*_by_turn(scores, columns), *_beside_one_part(scores, columns)] if columns else []
    return ["## Turn by turn", "", *tables] if tables else []


def _by_turn(scores: Scores[Result], columns: Sequence[Column]) -> list[str]:
    """Scores by the turn that tells and the turn that asks."""
    told = _split(scores, chats.told_in, range(1, 1 + chats.TOLD))
    asked = _split(scores, chats.asked_in, range(1 + chats.TOLD, 1 + chats.TURNS))
    if not told:
        return []
    shown = [*scores.fixed, *columns]
    rows = [[str(c), *(one.mean(c) or NONE for one in (*told.values(), *asked.values()))] for c in shown]
    heads = [*(f"told in {turn}" for turn in told), *(f"asked in {turn}" for turn in asked)]
    return [
        "By the turn in which a fact is told, and that in which it is asked for:",
        "",
        *table(["", *heads], rows),
        "",
    ]


def _split(
    scores: Scores[Result], turn_in: Callable[[str, int], int], turns: Sequence[int]
) -> dict[int, Scores[Result]]:
    """Results by a turn of their chat."""
    results = [result for result in scores.results if result.task.startswith(OF_TURNS)]

    def of(turn: int) -> list[Result]:
        return [r for r in results if turn_in(r.task.removeprefix(OF_TURNS), r.index) == turn]

    return {turn: Scores(found) for turn in turns if (found := of(turn))}


def _beside_one_part(scores: Scores[Result], columns: Sequence[Column]) -> list[str]:
    """The same policies and budgets where all that comes before the question is compressed as one part."""
    pairs = [(column, Column(column.policy, column.budget, ONE_PART)) for column in columns]
    both = [(one, other) for one, other in pairs if other in scores.columns]
    rows = [[str(one), signed(scores.difference(one, other))] for one, other in both]
    if not rows:
        return []
    about = "How much higher than with one part: all that comes before the question, compressed at once (scope prefix):"
    return [about, "", *table(["", "difference on the same samples"], rows), ""]
