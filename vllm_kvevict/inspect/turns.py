"""What each turn of a conversation keeps, as lines of text."""

from collections.abc import Sequence

from vllm_kvevict.inspect.data import Inspection


def lines_of(inspection: Inspection) -> list[str]:
    """A table of the turns, and of the branch's if there is one; nothing where no turns are evicted."""
    lines = _table(inspection) if inspection.turns else []
    if inspection.branch is not None:
        count = inspection.shared_turns
        tokens = inspection.turns[count - 1] if count else 0
        lines.append(f"the branch shares {count} of {len(inspection.turns)} turns ({tokens:,} tokens):")
        lines += _table(inspection.branch)
    return lines


def _table(inspection: Inspection) -> list[str]:
    lengths = inspection.tokens_per_turn
    shares = [
        [f"{100 * share:.1f} %" for share in inspection.shares_per_turn(kept)] for kept in inspection.kept
    ]
    names = [*map(str, range(1, len(inspection.turns) + 1)), "rest"][: len(lengths)]
    cells = [
        ["turn", "tokens", *(kept.policy for kept in inspection.kept)],
        *map(list, zip(names, (f"{length:,}" for length in lengths), *shares, strict=True)),
    ]
    return _aligned(cells)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in cells]
