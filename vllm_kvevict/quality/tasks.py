"""Retrieval tasks made of plain words: a long text, a question about it, and the answer.

The families are RULER's (Hsieh et al. 2024): needles with one key, many keys, several values, several keys at once,
variable chains, common words, and questions over facts. Texts are words and full stops, separated by single spaces, so
that their length in tokens is known to a word-level tokenizer; other models can be asked the same things.
"""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

Sentence = list[str]

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RELATIONS = ("lives", "works", "likes", "drives")
FUNCTION_WORDS = (".", "?", "what", "trace", "copy", "count", "common", *RELATIONS, *NUMBERS)

INSTRUCTION = (
    "Answer from the text in the same words. A sentence that begins with a name says what belongs to it: "
    "repeat the name and what follows it."
)
"""For models that were not trained on these texts."""


@cache
def words() -> tuple[str, ...]:
    """All content words: the first half are names, the other half values, so that no word is both."""
    return tuple((Path(__file__).parent / "words.txt").read_text().split())


def names() -> tuple[str, ...]:
    return words()[: len(words()) // 2]


def values() -> tuple[str, ...]:
    return words()[len(words()) // 2 :]


@dataclass(frozen=True)
class Sample:
    """One question about one text.

    Attributes:
        task: its family.
        context: the text.
        question: what is asked.
        answer: the whole expected reply.
        expected: what must occur in a reply; the score is the share that does.
        depth: where the (first) needle lies in the text, 0 at its beginning, 1 at its end.
    """

    task: str
    context: str
    question: str
    answer: str
    expected: tuple[str, ...]
    depth: float


def score(sample: Sample, reply: str) -> float:
    """Share of the expected strings in a reply, whatever its capitals and marks (RULER's string_match_all)."""
    text = f" {' '.join(re.findall(r'[a-z]+', reply.lower()))} "
    return sum(f" {part} " in text for part in sample.expected) / len(sample.expected)


@dataclass
class Needle:
    """What a task hides, and what it asks."""

    sentences: list[Sentence]
    question: Sentence
    answer: Sentence
    expected: tuple[str, ...]


class WordDraw:
    """Words for one text, of all words or of the first `limit` names and values; no name is drawn twice."""

    def __init__(self, rng: random.Random, limit: int | None = None):
        self.rng = rng
        self._names = list(names()[:limit])
        self._values = values()[:limit]
        rng.shuffle(self._names)

    def name(self) -> str:
        return self._names.pop()

    def values(self, count: int) -> list[str]:
        return self.rng.choices(self._values, k=count)

    def record(self) -> Sentence:
        """A name and the two words that belong to it."""
        return [self.name(), *self.values(2), "."]

    def noise(self, kind: str) -> Sentence:
        """A sentence that no question is about."""
        if kind == "records" and len(self._names) > 50:
            return self.record()
        return [*self.values(self.rng.randint(3, 7)), "."]


def needle_values(draw: WordDraw, count: int = 3) -> Needle:
    """One name with several records."""
    name = draw.name()
    records = [[name, *draw.values(2), "."] for _ in range(count)]
    answer = [word for record in records for word in record]
    expected = tuple(" ".join(record[1:3]) for record in records)
    return Needle(records, ["what", *[name] * count, "?"], answer[:-1], expected)


def needle_queries(draw: WordDraw, count: int = 3) -> Needle:
    """Names with a record each, asked at once."""
    records = [draw.record() for _ in range(count)]
    answer = [word for record in records for word in record][:-1]
    question = ["what", *(record[0] for record in records), "?"]
    return Needle(records, question, answer, tuple(" ".join(record[1:3]) for record in records))


def chain(draw: WordDraw, hops: int = 3) -> Needle:
    """Names that lead to names, and at last to two words."""
    links = [draw.name() for _ in range(hops)]
    end = draw.values(2)
    sentences = [[a, b, "."] for a, b in itertools.pairwise(links)] + [[links[-1], *end, "."]]
    return Needle(sentences, ["trace", links[0], "?"], [*links, *end], (" ".join(end),))


def passage(draw: WordDraw, length: int = 10) -> Needle:
    """A longer passage to repeat."""
    name, text = draw.name(), draw.values(length)
    return Needle([[name, *text, "."]], ["copy", name, "?"], [name, *text], (" ".join(text),))


def count(draw: WordDraw) -> Needle:
    """How often a name has a record."""
    name, times = draw.name(), draw.rng.randint(1, 5)
    records = [[name, *draw.values(2), "."] for _ in range(times)]
    return Needle(records, ["count", name, "?"], [name, NUMBERS[times]], (f"{name} {NUMBERS[times]}",))


def facts(draw: WordDraw) -> Needle:
    """One of several facts about a name."""
    name = draw.name()
    known = [[name, relation, *draw.values(1), "."] for relation in draw.rng.sample(RELATIONS, 3)]
    asked = draw.rng.choice(known)
    return Needle(known, ["what", name, asked[1], "?"], asked[:-1], (" ".join(asked[:-1]),))


def common(draw: WordDraw, length: int = 40) -> Needle:
    """The word that occurs most often."""
    word = draw.values(1)[0]
    sentences = [[word, *draw.values(2), "."] for _ in range(length // 4)]
    return Needle(sentences, ["common", "?"], [word], (word,))


TASKS: dict[str, tuple[Callable[[WordDraw], Needle], str]] = {
    "single": (partial(needle_queries, count=1), "filler"),
    "multikey": (partial(needle_queries, count=1), "records"),
    "multivalue": (needle_values, "filler"),
    "multiquery": (needle_queries, "records"),
    "chain": (chain, "filler"),
    "passage": (passage, "filler"),
    "count": (count, "filler"),
    "facts": (facts, "records"),
    "common": (common, "filler"),
}
"""By name: what is hidden, and the noise around it."""

ALONE = ("common",)
"""Tasks that ask about the whole text, so that no other question may be hidden in it."""


def most_questions() -> int:
    """How many questions a text may have: none needs more than three names of its own."""
    return len(names()) // 3


def make(task: str, length: int, rng: random.Random, depth: float | None = None) -> Sample:
    """A sample whose text has `length` words and full stops, give or take a sentence.

    Args:
        task: one of TASKS.
        depth: where the needle's sentences lie, 0 to 1; None spreads them at random.
    """
    maker, noise = TASKS[task]
    draw = WordDraw(rng)
    needle = maker(draw)
    return _sample(task, needle, *hide(draw, needle.sentences, noise, length, depth))


def make_many(names: Sequence[str], length: int, rng: random.Random) -> list[Sample]:
    """Samples that share one text of `length` words and full stops, give or take a sentence, among other records.

    Args:
        names: of a task for every question; no name of the text is in two of them.
    """
    draw = WordDraw(rng)
    needles = [TASKS[name][0](draw) for name in names]
    hidden = sum(len(sentence) for needle in needles for sentence in needle.sentences)
    sentences = background(draw, "records", length - hidden)
    for needle in needles:
        places = sorted(rng.randint(0, len(sentences)) for _ in needle.sentences)
        insert(sentences, needle.sentences, places)
    text = _joined(sentences)
    depths = [sentences.index(needle.sentences[0]) / max(1, len(sentences) - 1) for needle in needles]
    found = zip(names, needles, depths, strict=True)
    return [_sample(name, needle, text, depth) for name, needle, depth in found]


def _sample(task: str, needle: Needle, text: str, depth: float) -> Sample:
    return Sample(task, text, " ".join(needle.question), " ".join(needle.answer), needle.expected, depth)


def hide(
    draw: WordDraw, needles: Sequence[Sentence], noise: str, length: int, depth: float | None
) -> tuple[str, float]:
    """Put sentences into noise; those of one needle keep their order. Returns the text and the first one's depth."""
    sentences = background(draw, noise, length - sum(map(len, needles)))
    if depth is None:
        places = sorted(draw.rng.randint(0, len(sentences)) for _ in needles)
    else:
        places = [round(depth * len(sentences))] * len(needles)
    insert(sentences, needles, places)
    return _joined(sentences), places[0] / max(1, len(sentences) - len(needles))


def background(draw: WordDraw, noise: str, room: int) -> list[Sentence]:
    """Sentences that no question is about, of so many words and full stops or a few more."""
    sentences: list[Sentence] = []
    while room > 0:
        sentences.append(draw.noise(noise))
        room -= len(sentences[-1])
    return sentences


def insert(sentences: list[Sentence], needles: Sequence[Sentence], places: Sequence[int]) -> None:
    """Put a needle's sentences in front of those at ascending places."""
    for place, needle in zip(reversed(places), reversed(needles), strict=True):
        sentences.insert(place, needle)


def _joined(sentences: Sequence[Sentence]) -> str:
    return " ".join(word for sentence in sentences for word in sentence)
