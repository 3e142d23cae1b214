"""Chats of eight turns on real text, for caches that are compressed turn by turn.

Four facts are told in the first four turns, one in each, among prose, and asked for in the last four. What was asked
before is in the chat with its right answer, so that everybody who is asked reads the same chat. With tools, the user
says facts with a task, and asks for them behind the results of the tools. And instructions list tools of which one is
to be called, behind a turn about something else.

Each fact is a task of its own, but tasks ask about the same chat: what one question leaves in a cache serves the next.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm_kvevict.quality import texts, tool_lists
from vllm_kvevict.quality.questions import Draw, Message, Question, QuestionKind, numbers

TOLD, ASKED = 4, 4
"""Turns that tell, and turns that ask."""
TURNS = TOLD + ASKED
RESULTS, AMID = 5, 2
"""Results of tools, and those before the first question."""
READ = "I have read it and I will remember it."


@dataclass(frozen=True)
class Told:
    """A fact that the user tells.

    Attributes:
        said: the sentence.
        asked: the question.
        start: how the answer begins.
        rest: how it goes on.
        expected: what must be in it.
        tokens: that the rest needs at most.
        score: a reply's share of what is right.
    """

    said: str
    asked: str
    start: str
    rest: str
    expected: tuple[str, ...]
    tokens: int
    score: Callable[[str], float]


def number(draw: Draw) -> Told:
    """A number of seven digits."""
    key, value = draw.key(), draw.number()
    start, rest = f"The special magic number for {key} is:", f" {value}."
    asked = "Repeat the sentence of the text with the special magic number, word for word."
    return Told(start + rest, asked, start, rest, (value,), 14, numbers([value]))


def phones(draw: Draw) -> Told:
    """Two numbers of seven digits."""
    key, values = draw.key(), [draw.number(), draw.number()]
    start, rest = f"The phone numbers of {key} are", f" {' and '.join(values)}."
    asked = "Repeat the sentence of the text with the phone numbers, word for word."
    return Told(start + rest, asked, start, rest, tuple(values), 28, numbers(values))


def words(draw: Draw) -> Told:
    """Two plain words."""
    key, found = draw.key(), draw.words(2)
    start, rest = f"The secret words of {key} are:", f' "{" ".join(found)}".'
    asked = "Repeat the sentence of the text with the secret words, word for word."
    return Told(start + rest, asked, start, rest, tuple(found), 16, partial(begins, rest.removesuffix(".")))


def value(draw: Draw) -> Told:
    """A value of a JSON object with `size` entries."""
    names = draw.words(draw.size)
    entries = {name: " ".join(draw.words(2)) for name in names}
    key = draw.rng.choice(names)
    said = f"\nThis is a JSON object:\n{json.dumps(entries, indent=1)}\n"
    start, rest = f'"{key}":', f' "{entries[key]}"'
    asked = "Repeat one entry of the JSON object, word for word."
    return Told(said, asked, start, rest, (entries[key],), 16, partial(begins, rest))


def begins(right: str, reply: str) -> float:
    """1.0 for a reply that begins with what is right, whatever its spaces."""
    return float(" ".join(reply.split()).startswith(right.strip()))


KINDS: dict[str, Callable[[Draw], Told]] = {"number": number, "phones": phones, "words": words, "json": value}
FIRST, TOOL_KINDS = "json", ("number", "phones")
"""What the user asks for amid the results of tools, and behind them."""


def told_in(kind: str, chat: int) -> int:
    """The turn, from 1 on, in which a chat tells the fact of a kind."""
    return 1 + (list(KINDS).index(kind) + chat) % TOLD


def asked_in(kind: str, chat: int) -> int:
    """The turn that asks for it; sixteen chats have each pair of turns once for each kind."""
    return 1 + TOLD + (told_in(kind, chat) + chat // TOLD) % ASKED


def shares(sentences: Sequence[str], count: int) -> list[list[str]]:
    """Sentences in their order, in parts of about the same number of characters."""
    whole, read = sum(map(len, sentences)), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for sentence in sentences:
        middle = read + len(sentence) / 2
        parts[int(middle * count / whole)].append(sentence)
        read += len(sentence)
    return parts


def conversation(draw: Draw, kind: str) -> Question:
    """A chat with a fact of each kind, and a question about one of them."""
    facts = {name: make(draw) for name, make in KINDS.items()}
    telling = {told_in(name, draw.index): fact for name, fact in facts.items()}
    asking = {asked_in(name, draw.index): fact for name, fact in facts.items()}
    prose, depths = draw.prose(), [draw.rng.random() for _ in facts]

    def turn(number: int, passage: list[str]) -> list[Message]:
        if number in telling:
            passage.insert(round(depths[number - 1] * len(passage)), telling[number].said)
        said, known = f"Read this text: {' '.join(passage)}", asking.get(number)
        if known is None:
            return [("user", said), ("assistant", READ)]
        return [("user", f"{known.asked} {said}"), ("assistant", known.start + known.rest)]

    def before(last: int, units: int) -> list[Message]:
        passages = shares(prose(units), TURNS - 1)[: last - 1]
        return [message for number, passage in enumerate(passages, 1) for message in turn(number, passage)]

    def about(kind: str) -> Question:
        return _question(facts[kind], partial(before, asked_in(kind, draw.index)))

    last = next(kind for kind in KINDS if asked_in(kind, draw.index) == TURNS)
    return replace(about(kind), last=about(last))


def tools(draw: Draw, kind: str) -> Question:
    """A task with facts, and results of tools; the user asks for one fact amid them, and for another one behind."""
    facts = {name: KINDS[name](draw) for name in (FIRST, *TOOL_KINDS)}
    prose, depths = draw.prose(), [draw.rng.random() for _ in facts]
    first = facts[FIRST]

    def before(units: int) -> list[Message]:
        task, *results = shares(prose(units), 1 + RESULTS)
        for fact, depth in zip(facts.values(), depths, strict=True):
            task.insert(round(depth * len(task)), fact.said)
        messages: list[Message] = [("user", f"Read this text, then read all files: {' '.join(task)}")]
        for number, result in enumerate(results, 1):
            messages += [("assistant", f"I will read file {number}."), ("tool", " ".join(result))]
            if number == AMID:
                messages += [("assistant", "I have read it."), ("user", first.asked)]
                messages += [("assistant", first.start + first.rest), ("user", "Read the other files.")]
        return [*messages, ("assistant", "I have read all files.")]

    return replace(_question(facts[kind], before), last=_question(facts[TOOL_KINDS[-1]], before))


def call(draw: Draw) -> Question:
    """Instructions list `size` tools; behind a turn of prose the assistant has to call one with its parameters."""
    listed = tool_lists.tools(draw.rng, draw.size, texts.sentences())
    asked, prose = draw.rng.choice(listed), draw.prose()
    source = "\n".join(tool.text for tool in listed)
    instructions = f"You can call these functions:\n```python\n{source}```"

    def before(units: int) -> list[Message]:
        said = f"Read this text: {' '.join(prose(units))}"
        return [("system", instructions), ("user", said), ("assistant", READ)]

    def score(reply: str) -> float:
        return float("".join(reply.split()).startswith("".join(asked.rest.split())))

    question = "Repeat one line of the source of your functions, word for word."
    return Question(before, question, asked.start, (asked.rest,), 16, score)


def _question(fact: Told, text: Callable[[int], list[Message]]) -> Question:
    return Question(text, fact.asked, fact.start, fact.expected, fact.tokens, fact.score)


OBJECT = 4, "entries of the object", range(1, 101)
_MAKERS = {f"turns-{kind}": (partial(conversation, kind=kind), *OBJECT, "turns") for kind in KINDS}
_MAKERS |= {f"tools-{kind}": (partial(tools, kind=kind), *OBJECT, "tools") for kind in TOOL_KINDS}
TASKS = {name: QuestionKind(*made) for name, made in _MAKERS.items()}
TASKS["call"] = QuestionKind(call, 7, "tools in the list", range(2, 26))
