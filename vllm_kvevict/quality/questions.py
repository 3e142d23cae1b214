"""Questions on real text, whose right answers code can check; each text has any length that is asked for.

The first token of an answer is chosen before a prompt is evicted: no answer begins with what is asked for.

number, multikey and multivalue are RULER's needles (Hsieh et al. 2024) in its kind of sentence. All others ask for what
the text says in some place, or for what a rule made.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_kvevict.quality import tasks, texts
from vllm_kvevict.quality.texts import Fact

Message = tuple[str, str]
"""A role of a chat and what it says."""

HEADER = "A special magic number is hidden within the following text. Remember it: you will be asked for it at the end."
"""RULER's first sentence, in front of every other text of number and multikey."""
REPEAT = "Repeat one sentence of the text, word for word."
REPEAT_LINE = "Repeat one line of this source, word for word."
COPIED_WORDS = 8
SNIPPET_WORDS = 3
LABELS = ("red", "green", "blue", "yellow")
TURNS = 6
TOPICS = 8
"""Of the labelled lines; each has one label."""


@dataclass(frozen=True)
class Question:
    """A question about a text of any length.

    Attributes:
        text: the messages before the question, from how many units (sentences, or lines of code) they have; if the last
            one is the user's, the question goes on in it.
        asked: the question.
        start: how the answer begins; the model goes on from there.
        expected: what the answer is.
        tokens: that it needs at most.
        score: a reply's share of what is right.
        last: the last question about the same text, if this is another one: a text has the length that it has there.
    """

    text: Callable[[int], list[Message]]
    asked: str
    start: str
    expected: tuple[str, ...]
    tokens: int
    score: Callable[[str], float]
    last: "Question | None" = None


@dataclass
class Draw:
    """What one question is made from.

    Attributes:
        rng: decides all of it.
        index: of the sample.
        size: how hard it is, in what the task counts.
    """

    rng: random.Random
    index: int
    size: int
    _words: list[str] = field(default_factory=list)

    def words(self, count: int) -> list[str]:
        """Plain words, none of them twice."""
        if not self._words:
            self._words = self.rng.sample(tasks.words(), len(tasks.words()))
        return [self._words.pop() for _ in range(count)]

    def key(self) -> str:
        return self.words(1)[0]

    def number(self) -> str:
        return str(self.rng.randrange(10**6, 10**7))

    def prose(self) -> Callable[[int], list[str]]:
        """So many sentences of the language reference, from a random place on; from its beginning behind its end."""
        all_of_it = texts.sentences()
        begin = self.rng.randrange(len(all_of_it))
        return lambda units: [all_of_it[(begin + i) % len(all_of_it)] for i in range(units)]


def hidden(draw: Draw, needles: Sequence[str], header: str = "") -> Callable[[int], list[Message]]:
    """Sentences in random places of prose, in their order."""
    prose, depths = draw.prose(), sorted(draw.rng.random() for _ in needles)

    def text(units: int) -> list[Message]:
        found = prose(units)
        for depth, needle in reversed(list(zip(depths, needles, strict=True))):
            found.insert(round(depth * units), needle)
        return [("user", "\n".join([header, " ".join(found)]).strip())]

    return text


def numbers(found: Sequence[str]) -> Callable[[str], float]:
    """1.0 for a reply with all digits of all these numbers; commas between digits do not count."""

    def score(reply: str) -> float:
        said = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d)", "", reply))
        return float(all(number in said for number in found))

    return score


def number(draw: Draw) -> Question:
    """One number of seven digits in the text; `size` keys have one, and one is asked for."""
    keys = [draw.key() for _ in range(draw.size)]
    values = [draw.number() for _ in keys]
    begins = [f"One of the special magic numbers for {key} is:" for key in keys]
    number = draw.rng.randrange(len(keys))
    needles = [f"{begin} {value}." for begin, value in zip(begins, values, strict=True)]
    text = hidden(draw, needles, HEADER if draw.index % 2 else "")
    asked = f"What is the special magic number for {keys[number]} mentioned in the text?"
    value = values[number]
    return Question(text, asked, begins[number], (value,), 14, numbers([value]))


def multivalue(draw: Draw) -> Question:
    """`size` numbers of one key in one sentence, all of them asked for."""
    key, values = draw.key(), [draw.number() for _ in range(draw.size)]
    begin = f"The special magic numbers for {key} are"
    text = hidden(draw, [f"{begin} {' and '.join(values)}."])
    asked = "Repeat the sentence of the text with the special magic numbers, word for word."
    return Question(text, asked, begin, tuple(values), 14 * draw.size, numbers(values))


def words(draw: Draw) -> Question:
    """`size` plain words of one key."""
    begin, found = f"The secret words for {draw.key()}", draw.words(draw.size)

    def score(reply: str) -> float:
        there = re.findall(r"[a-z]+", reply.lower())
        return float(all(word in there for word in found))

    text = hidden(draw, [f"{begin} are {' and '.join(found)}."])
    return Question(text, REPEAT, begin, tuple(found), 8 * draw.size, score)


def copy(draw: Draw) -> Question:
    """The next eight words of a sentence, of which `size` words or more are given."""
    # Marks other than commas are what small models change first.
    plain = [one for one in texts.sentences() if re.fullmatch(r"[\w, ]+\.", one)]
    long_ones = [one for one in plain if len(one.split()) >= draw.size + COPIED_WORDS]
    sentence = draw.rng.choice(long_ones).split()
    given = max(draw.size, min(len(sentence) // 2, len(sentence) - COPIED_WORDS))
    rest = sentence[given : given + COPIED_WORDS]

    def score(reply: str) -> float:
        """The share of the words before the first one that differs."""
        said = reply.split()[: len(rest)]
        right = [one == other for one, other in zip(said, rest, strict=False)]
        return (right.index(False) if False in right else len(right)) / len(rest)

    text, begin = hidden(draw, [" ".join(sentence)]), " ".join(sentence[:given])
    return Question(text, REPEAT, begin, (" ".join(rest),), 5 * COPIED_WORDS, score)


def json_value(draw: Draw) -> Question:
    """A value of an object with `size` entries."""
    names = draw.words(draw.size)
    entries = {name: " ".join(draw.words(2)) for name in names}
    key = draw.rng.choice(names)

    def score(reply: str) -> float:
        value = re.match(r'\s*"([^"]*)"', reply)
        return float(value is not None and value[1] == entries[key])

    text = hidden(draw, [f"\nThis is a JSON object:\n{json.dumps(entries, indent=1)}\n"])
    asked = "Repeat one entry of the JSON object, word for word."
    return Question(text, asked, f'"{key}":', (entries[key],), 16, score)


def around(draw: Draw, fact: Fact) -> Callable[[int], list[Message]]:
    """Source code with a fact in a random place: its module, and other modules where that is too short."""
    sources = texts.sources()
    others = [name for name in sources if name != fact.module]
    draw.rng.shuffle(others)
    half = len(others) // 2
    own = sources[fact.module]
    before = [*(line for name in others[:half] for line in sources[name]), *own[: fact.line]]
    behind = [*own[fact.line :], *(line for name in others[half:] for line in sources[name])]
    depth = draw.rng.random()

    def text(units: int) -> list[Message]:
        first = round(depth * units)
        lines = [*before[len(before) - first :], behind[0], *behind[1 : 1 + units - first]]
        return [("user", "\n".join(["```python", *lines, "```"]))]

    return text


def signature(draw: Draw) -> Question:
    """A function's parameters, in at most `size` characters."""
    fact = draw.rng.choice([one for one in texts.signatures() if len(one.value) <= draw.size])
    right = "".join(f"({fact.value})".split())

    def score(reply: str) -> float:
        return float("".join(reply.split()).startswith(right))

    return Question(around(draw, fact), REPEAT_LINE, f"def {fact.name}", (fact.value,), 48, score)


def name(draw: Draw) -> Question:
    """What a constant is set to, in at most `size` characters."""
    fact = draw.rng.choice([one for one in texts.constants() if len(one.value) <= draw.size])

    def score(reply: str) -> float:
        line = next(iter(reply.strip().splitlines()), "")
        return float(line.partition("  #")[0].strip(" `") == f"= {fact.value}")

    return Question(around(draw, fact), REPEAT_LINE, fact.name, (fact.value,), 24, score)


def few_shot(draw: Draw) -> Question:
    """The label of a new line, after `size` labelled ones; each topic has one label."""
    topics = draw.words(TOPICS)
    label_of = dict(zip(topics, draw.rng.choices(LABELS, k=TOPICS), strict=True))
    snippets = draw.rng.sample(texts.sentences(), draw.size + 1)
    # The topic that is asked for occurs as often as the others.
    of_line = [topics[i % TOPICS] for i in range(draw.size)]
    draw.rng.shuffle(of_line)
    topic = draw.rng.choice(topics)

    def line(snippet: str, topic: str) -> str:
        cut = " ".join(snippet.split()[:SNIPPET_WORDS])
        return f"{cut} about {topic}"

    pairs = zip(snippets, of_line, strict=False)
    lines = [f"{line(snippet, topic)} is {label_of[topic]}" for snippet, topic in pairs]

    def score(reply: str) -> float:
        said = re.findall(r"[a-z]+", reply.lower())[:2]
        return float(said == ["is", label_of[topic]])

    asked, right, prose = line(snippets[-1], topic), label_of[topic], draw.prose()
    head = ["These lines have labels:", *lines, "Here is some other text:"]

    def text(units: int) -> list[Message]:
        """The lines come first, so that they are not what is read last."""
        return [("user", "\n".join([*head, " ".join(prose(units))]))]

    return Question(text, "Label one more line like those above.", asked, (right,), 6, score)


def chat_needle(draw: Draw) -> Question:
    """Six turns of a chat: `size` numbers are told, one a turn from the first on; the sixth asks for the first one."""
    keys = [draw.key() for _ in range(draw.size)]
    values, prose = [draw.number() for _ in keys], draw.prose()

    def turn(index: int, passage: Sequence[str]) -> list[Message]:
        told = ""
        if index < len(keys):
            told = f"Remember this: the special magic number for {keys[index]} is {values[index]}. "
        said = f"{told}Read this text: {' '.join(passage)}"
        return [("user", said), ("assistant", "I have read it and I will remember it.")]

    def text(units: int) -> list[Message]:
        found = prose(units)
        cuts = [units * i // (TURNS - 1) for i in range(TURNS)]
        return [message for i in range(TURNS - 1) for message in turn(i, found[cuts[i] : cuts[i + 1]])]

    asked = f"What is the special magic number for {keys[0]}?"
    start = f"The special magic number for {keys[0]} is"
    return Question(text, asked, start, (values[0],), 14, numbers(values[:1]))


@dataclass(frozen=True)
class QuestionKind:
    """A kind of question.

    Attributes:
        make: makes one.
        size: how hard, by default: chosen so that SmolLM2-135M-Instruct answers nine of ten at 1k tokens with the full
            cache, where it can.
        counts: what `size` counts.
        sizes: that it can have.
        texts: tasks with the same name here ask about the same texts; empty: no others do.
    """

    make: Callable[[Draw], Question]
    size: int
    counts: str
    sizes: range
    texts: str = ""

    def says_sizes(self) -> str:
        """The possible sizes in words."""
        return f"it must be {self.sizes.start} to {self.sizes.stop - 1} ({self.counts})"


TASKS: dict[str, QuestionKind] = {
    "number": QuestionKind(number, 1, "keys with a number", range(1, 33)),
    "multikey": QuestionKind(number, 2, "keys with a number", range(1, 33)),
    "multivalue": QuestionKind(multivalue, 2, "numbers of the key", range(1, 9)),
    "words": QuestionKind(words, 2, "words of the key", range(1, 9)),
    "copy": QuestionKind(copy, 10, "words of the sentence that are given, at least", range(4, 17)),
    "json": QuestionKind(json_value, 8, "entries of the object", range(1, 101)),
    "signature": QuestionKind(signature, 24, "characters of the parameters, at most", range(12, 81)),
    "name": QuestionKind(name, 8, "characters of the value, at most", range(4, texts.LONGEST_VALUE + 1)),
    "few-shot": QuestionKind(few_shot, 40, "labelled lines", range(TOPICS, 401)),
    "chat-needle": QuestionKind(chat_needle, 2, "numbers that are told", range(1, TURNS)),
}

SUMMARY = "Summarise the text above in a few sentences."
CONTINUE = "Continue the text above."
OPEN = (
    "What is the text above about, and for whom is it written?",
    "Which rules does the text above give? List the most important ones.",
    "Explain one idea of the text above to a beginner.",
    "What would you ask the author of the text above?",
)


def _open(*asked: str) -> QuestionKind:
    """One of these questions about prose in which nothing is hidden; every reply scores 0."""

    def make(draw: Draw) -> Question:
        return Question(hidden(draw, []), draw.rng.choice(asked), "", (), 0, lambda reply: 0.0)

    return QuestionKind(make, 1, "nothing", range(1, 2))


OPEN_TASKS = {"summary": _open(SUMMARY), "continuation": _open(CONTINUE), "open": _open(*OPEN)}
"""Without one right answer; fidelity is measured for them."""
