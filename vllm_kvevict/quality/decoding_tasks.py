"""Answers that are scored while they are evicted: long ones that the model writes, and made ones that recall facts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvevict.quality.texts import sentences

WRITING, RECALL = "writing", "recall"
TASKS = (WRITING, RECALL)
FORMS = (
    "Write a long story about {}.",
    "Write a long and detailed essay about {}.",
    "Explain everything that a beginner should know about {}, step by step and in full sentences.",
    "Write a long letter to a friend about {}.",
)
SUBJECTS = (
    *("a lighthouse keeper and a small harbour", "a night train through the mountains", "an old clockmaker"),
    *(
        "the history of bread",
        "how rivers shape a landscape",
        "keeping bees",
        "the first days at a new school",
    ),
    *(
        "how a library is run",
        "a gardener who loses her garden",
        "how ships were navigated before satellites",
    ),
    *("a village that builds a bridge", "learning to play the violin", "how weather forecasts are made"),
    *("a forest after a fire", "the work of a baker", "why cities grow", "a letter that arrives too late"),
    *("how glass is made", "an expedition to a cold island", "the life of a street musician"),
    *("how to plan a long journey on foot", "a museum at night", "growing vegetables on a balcony"),
)
NAMES = (
    *(
        "Anna",
        "Peter",
        "Maria",
        "Robert",
        "Sarah",
        "David",
        "Laura",
        "Thomas",
        "Emma",
        "Daniel",
        "Alice",
        "Martin",
    ),
)
FACTS = 4
ASKED = (
    "Give {count} people an access code each. Then write down what you know about a programming language. At the end "
    "repeat the access codes."
)


def writing(seed: int, samples: int) -> list[str]:
    """What the model is asked to write about; the same seed gives the same, however many are asked for."""
    asked = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    random.Random(f"{seed}/{WRITING}").shuffle(asked)
    return [asked[index % len(asked)] for index in range(samples)]


@dataclass(frozen=True)
class Recall:
    """An answer that begins with facts and ends with them.

    Attributes:
        asked: the prompt.
        pieces: the answer, in pieces; every second one, from the second on, is a value that was said before.
    """

    asked: str
    pieces: Sequence[str]

    @property
    def values(self) -> Sequence[str]:
        return self.pieces[1::2]


def recall(seed: int, index: int, words: int) -> Recall:
    """One such answer.

    Args:
        words: between the facts and their repetition, at least; no tokenizer has fewer tokens.
    """
    rng = random.Random(f"{seed}/{RECALL}/{index}")
    names = rng.sample(NAMES, FACTS)
    codes = {name: f"{rng.randrange(1000, 10000)}" for name in names}
    said = " ".join(f'The access code of {name} is "{code}".' for name, code in codes.items())
    between: list[str] = []
    start = rng.randrange(len(sentences()))
    while sum(len(sentence.split()) for sentence in between) < words:
        between.append(sentences()[(start + len(between)) % len(sentences())])
    again = rng.sample(names, FACTS)
    pieces = [f"{said}\n\n{' '.join(between)}\n\nAgain, the access codes from the beginning."]
    for name in again:
        pieces[-1] += f' The access code of {name} is "'
        pieces += [codes[name], '".']
    return Recall(ASKED.format(count=FACTS), pieces)
