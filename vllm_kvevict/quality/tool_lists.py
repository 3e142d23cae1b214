"""Lists of tools as instructions have them: made-up functions, each with its parameters and what it is said to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ABOUT = 3
"""Sentences about each."""
FEWEST, MOST = 2, 3
"""Parameters of one."""
LISTS = (Path(__file__).parent / "tools.txt").read_text().split("\n\n")
VERBS, NOUNS, PARAMETERS = (words.split() for words in LISTS)


@dataclass(frozen=True)
class Tool:
    """A function that an assistant may call.

    Attributes:
        start: its signature up to the parameters.
        rest: the parameters; no other tool of a list has one of them.
        text: all of it.
    """

    start: str
    rest: str
    text: str


def tools(rng: Random, count: int, sentences: Sequence[str]) -> list[Tool]:
    """So many tools whose names have no word in common.

    Args:
        sentences: what may be said about them.
    """
    verbs, nouns = rng.sample(VERBS, count), rng.sample(NOUNS, count)
    parameters = iter(rng.sample(PARAMETERS, MOST * count))
    said = iter(rng.sample(sentences, ABOUT * count))
    found = []
    for verb, noun in zip(verbs, nouns, strict=True):
        start = f"def {verb}_{noun}"
        rest = f"({', '.join(next(parameters) for _ in range(rng.randint(FEWEST, MOST)))})"
        about = [f"    {next(said)}" for _ in range(ABOUT)]
        lines = [f"{start}{rest}:", f'    """{verb.capitalize()} a {noun}.', "", *about, '    """', ""]
        found.append(Tool(start, rest, "\n".join(lines)))
    return found
