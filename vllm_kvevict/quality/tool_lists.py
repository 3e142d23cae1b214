"""Lists of tools as instructions have them: made-up functions, each with its parameters and what it is said to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

ABOUT = 3
"""Sentences about each."""
FEWEST, MOST = 2, 3
"""Parameters of one."""
VERBS = (
    "add book cancel check compare copy count find hide list lock move open order print read rename send "
    "share sort start stop track update watch"
)
NOUNS = (
    "alarm album bill camera contact file flight folder game hotel lamp letter map meeting message movie "
    "note parcel photo recipe report room route song table taxi ticket timer train video"
)
PARAMETERS = (
    "address age amount angle artist audience author balance branch brand budget capacity category "
    "channel city color comment condition contract copies country coupon currency customer date deadline "
    "deposit depth discount distance district duration email engine fabric fee flavor floor font footer "
    "format gender genre grade guests header height host hour icon identity income index industry "
    "interval journal keyword label language latitude length level license limit location longitude "
    "margin material maximum method minimum mode model month number offset operator origin owner page "
    "password percent phone pitch platform port position postcode price priority profile province "
    "publisher quality quantity radius rank rating reason recipient region repeat resolution role salary "
    "score season seats section sender shape sheet signal size slot source speed stage status street "
    "student style subject subtitle supplier symbol target tax teacher temperature theme threshold time "
    "title token topic total traveler unit username vehicle vendor version volume wage warranty website "
    "weight width year zone"
)


@dataclass(frozen=True)
class Tool:
    """A function that an assistant may call.

    Attributes:
        name: a verb and a noun.
        parameters: their names; no other tool of a list has one of them.
        about: what it does.
    """

    name: str
    parameters: tuple[str, ...]
    about: tuple[str, ...]

    @property
    def start(self) -> str:
        """Its signature up to the parameters."""
        return f"def {self.name}"

    @property
    def rest(self) -> str:
        """The parameters."""
        return f"({', '.join(self.parameters)})"

    @property
    def text(self) -> str:
        """All of it."""
        verb, noun = self.name.split("_")
        lines = [f"{self.start}{self.rest}:", f'    """{verb.capitalize()} a {noun}.', ""]
        return "\n".join([*lines, *(f"    {sentence}" for sentence in self.about), '    """', ""])


def tools(rng: Random, count: int, sentences: Sequence[str]) -> list[Tool]:
    """So many tools whose names have no word in common.

    Args:
        sentences: what may be said about them.
    """
    verbs, nouns = rng.sample(VERBS.split(), count), rng.sample(NOUNS.split(), count)
    parameters = iter(rng.sample(PARAMETERS.split(), MOST * count))
    said = iter(rng.sample(sentences, ABOUT * count))
    return [
        Tool(
            f"{verb}_{noun}",
            tuple(next(parameters) for _ in range(rng.randint(FEWEST, MOST))),
            tuple(next(said) for _ in range(ABOUT)),
        )
        for verb, noun in zip(verbs, nouns, strict=True)
    ]
