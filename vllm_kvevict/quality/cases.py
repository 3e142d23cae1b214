"""What is asked, in the one form that the driver knows."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_kvevict.chats import ChatRequest
from vllm_kvevict.quality import tasks
from vllm_kvevict.quality.results import Sampled

TOKENS_PER_WORD = 3
"""At most, for the words of the generated tasks and the tokenizers of usual models."""
TEXT = "text/"
"""How the names of tasks on real text begin."""
PROBES = ("what ?", "count ?")
"""Short questions that begin differently, in words that the needle model's tokenizer tells apart."""


@dataclass(frozen=True)
class Case(Sampled):
    """One question about one text.

    Attributes:
        context: the text.
        question: what is asked behind the text.
        expected: what a reply should contain.
        max_tokens: of the reply.
        score: a reply's share of what is expected.
        form: ``documents``: the text is the system's message; ``message``: text and question are one message;
            ``completion``: the same without a chat template.
        reply_start: the assistant's first words, which the model continues.
        turns: messages of a chat before all this, each a role and what it says.
        chat: the user's own, instead of all this but the question, which is that of its last user message.
        answer: that exists already, in pieces; every second one, from the second on, repeats what was said before.
    """

    context: str
    question: str
    expected: tuple[str, ...]
    max_tokens: int
    score: Callable[[str], float]
    form: str = "documents"
    reply_start: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    chat: ChatRequest | None = None
    answer: tuple[str, ...] = ()

    @property
    def has_prefix(self) -> bool:
        """Whether anything comes before the question."""
        if self.chat is not None:
            return self.chat.question is not None and bool(
                self.chat.question or self.chat.settings.get("tools")
            )
        return bool(self.context or self.turns)

    def prompt(self, question: str | None = None) -> dict[str, Any]:
        """What the API calls it, with the case's own question or another one: a chat or a text to complete."""
        if self.chat is not None:
            return self.chat.body(question)
        asked = self.question if question is None else question
        if self.form == "completion":
            return {"prompt": self.context + asked + self.reply_start}
        messages = [{"role": role, "content": said} for role, said in self.turns]
        if self.form == "message":
            messages.append({"role": "user", "content": self.context + asked})
        else:
            messages += [{"role": "system", "content": self.context}, {"role": "user", "content": asked}]
        if not self.reply_start:
            return {"messages": messages}
        messages.append({"role": "assistant", "content": self.reply_start})
        return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}

    def probe(self) -> str:
        """A question that begins differently from this one's."""
        start = self.question.lstrip()[:1].lower()
        return next(probe for probe in PROBES if not start or probe[0] != start)

    def __str__(self) -> str:
        unit = "words" if self.task in tasks.TASKS else "tokens"
        length = "" if self.length is None else f", {self.length} {unit}"
        depth = "" if self.depth is None else f", depth {self.depth:g}"
        return f"{self.task}{length}{depth}, sample {self.index}"


@dataclass(frozen=True)
class Generated:
    """Samples made from a seed.

    Attributes:
        names: of tasks.
        lengths: of the texts, in words and full stops.
        depths: of the needle; (None,) for random ones.
        samples: of each combination.
        seed: the same seed gives the same samples, however many are asked for.
        instruct: say in front of the text what is to be done with it.
        slack: tokens of the reply on top of what its words need.
        questions: about each text. With several, `samples` counts texts of each length, the tasks take turns, and
            the noise is other records.
    """

    names: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float | None]
    samples: int
    seed: int
    instruct: bool
    slack: int
    questions: int = 1

    def __len__(self) -> int:
        if self.questions > 1:
            return self.samples * self.questions * len(self.lengths)
        return self.samples * len(self.names) * len(self.lengths) * len(self.depths)

    def __iter__(self) -> Iterator[Case]:
        # The first sample of everything comes first: a run that is stopped early is thin, but complete.
        for index in range(self.samples):
            for length in self.lengths:
                if self.questions > 1:
                    yield from self.about_one_text(length, index)
                    continue
                for name in self.names:
                    for depth in self.depths:
                        yield self.case(name, length, depth, index)

    def fingerprints(self) -> dict[str, str]:
        """For each task a digest of one sample, the same whatever is asked for: it changes when the texts do."""
        found = {name: tasks.make(name, 200, random.Random(self.seed)) for name in self.names}
        return {name: _digest(made.context, made.question, *made.expected) for name, made in found.items()}

    def case(self, name: str, length: int, depth: float | None, index: int) -> Case:
        """One sample; a pure function of the seed and what it is called by."""
        rng = random.Random(f"{self.seed}/{name}/{length}/{depth}/{index}")
        return self._case(tasks.make(name, length, rng, depth), length, depth, index)

    def about_one_text(self, length: int, text: int) -> list[Case]:
        """All questions about one text, numbered through over the texts."""
        numbers = range(text * self.questions, (text + 1) * self.questions)
        names = [self.names[number % len(self.names)] for number in numbers]
        samples = tasks.make_many(
            names, length, random.Random(f"{self.seed}/{'+'.join(names)}/{length}/{text}")
        )
        return [
            self._case(sample, length, None, number) for sample, number in zip(samples, numbers, strict=True)
        ]

    def _case(self, sample: tasks.Sample, length: int, depth: float | None, index: int) -> Case:
        context = f"{tasks.INSTRUCTION}\n\n{sample.context}" if self.instruct else sample.context
        tokens = TOKENS_PER_WORD * len(sample.answer.split()) + self.slack
        named, score = (sample.task, length, depth, index), partial(tasks.score, sample)
        return Case(*named, context, sample.question, sample.expected, tokens, score)


def fingerprint(cases: Sequence[Case]) -> str:
    """A digest of all of them."""
    texts: list[str] = []
    for case in cases:
        chat = [json.dumps(case.chat.body())] if case.chat else []
        texts += [*(said for _, said in case.turns), case.context, case.question, *chat]
    return _digest(*texts)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
