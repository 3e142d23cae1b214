"""Questions on real text as cases of a wanted number of tokens, as the served model counts them."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_kvevict.quality import chats, questions
from vllm_kvevict.quality.cases import TEXT, Case, fingerprint
from vllm_kvevict.quality.endpoint import Endpoint
from vllm_kvevict.quality.questions import Draw, Message, Question
from vllm_kvevict.quality.texts import TextError

TASKS = {**questions.TASKS, **chats.TASKS, **questions.OPEN_TASKS}
PLAIN = "plain"
SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
FIRST_UNITS = 32
DIGEST_UNITS = 8


@dataclass(frozen=True)
class TextQuestions:
    """Samples made from a seed and the texts of this machine.

    Attributes:
        names: of tasks.
        tokens: lengths of the prompts: at most so many, and less than one sentence or line below that.
        samples: of each task and length.
        seed: the same seed gives the same samples, however many are asked for.
        form: chat, or plain.
        sizes: by task, how hard it is; others have their default.
        slack: tokens of the reply on top of what the answer needs.
    """

    names: Sequence[str]
    tokens: Sequence[int]
    samples: int
    seed: int
    form: str
    sizes: Mapping[str, int]
    slack: int

    def __len__(self) -> int:
        return self.samples * len(self.names) * len(self.tokens)

    def names_of_samples(self) -> Iterator[tuple[str, int, int]]:
        """Task, length and index of each; the first sample of everything comes first."""
        for index, tokens, name in itertools.product(range(self.samples), self.tokens, self.names):
            yield name, tokens, index

    def question(self, name: str, index: int) -> Question:
        """A task's question; the same one at every length."""
        task = TASKS[name]
        size = self.sizes.get(name, task.size)
        rng = random.Random(f"{self.seed}/{task.texts or name}/{size}/{index}")
        return task.make(Draw(rng, index, size))

    def case(self, name: str, tokens: int, index: int, units: int) -> Case:
        """A sample whose text has so many sentences or lines."""
        return to_case(self.question(name, index), name, tokens, index, units, self.form, self.slack)

    def fingerprints(self) -> dict[str, str]:
        """For each task a digest of one short case: it changes when the texts do."""
        found = [self.case(name, 0, 0, DIGEST_UNITS) for name in self.names]
        return {case.task: fingerprint([case]) for case in found}


def to_case(
    question: Question, task: str, tokens: int | None, index: int, units: int, form: str, slack: int
) -> Case:
    """A question about a text of so many units, as a chat or as a text to complete."""
    messages = question.text(units)
    before = messages[:-1] if messages[-1][0] == "user" else messages
    context = f"{messages[-1][1]}\n\n" if len(before) < len(messages) else ""
    if form == PLAIN:
        context = "".join(_spoken(message) for message in before) + context
        asked, before = f"Question: {question.asked}\nAnswer:", []
        start = f" {question.start}" if question.start else ""
    else:
        asked, start = question.asked, question.start
    return Case(
        task=f"{TEXT}{task}",
        length=tokens,
        depth=None,
        index=index,
        context=context,
        question=asked,
        expected=question.expected,
        max_tokens=question.tokens + slack,
        score=question.score,
        form="completion" if form == PLAIN else "message",
        reply_start=start,
        turns=tuple(before),
    )


def _spoken(message: Message) -> str:
    """A message of a chat in a text without a template."""
    role, said = message
    return f"{SPEAKERS[role]}: {said}\n\n"


async def fit(make: Callable[[int], Case], tokens: int, count: Callable[[Case], Awaitable[int]]) -> int:
    """The units of the longest case that has at most so many tokens.

    Args:
        make: a case from a number of units; more units have more tokens.
        tokens: of the whole prompt.
        count: the tokens of a case's prompt.

    Raises:
        TextError: the shortest one has more.
    """
    low, shortest = 0, make(0)
    least = await count(shortest)
    if least > tokens:
        raise TextError(f"--tokens {tokens}: a question of {shortest.task} needs at least {least} tokens")
    high, guess, measured = None, FIRST_UNITS, least
    while high is None or high - low > 1:
        case = make(guess)
        found = await count(case)
        if found <= tokens:
            low, measured = guess, found
        else:
            high = guess
        per_unit = max(1, found - least) / guess
        guess = low + max(1, int((tokens - measured) / per_unit))
        guess = min(guess, low + 2 * FIRST_UNITS + low) if high is None else min(guess, high - 1)
    return low


async def cases(
    asked: TextQuestions, endpoint: Endpoint, at_once: int, done: Callable[[], None]
) -> list[Case]:
    """All samples, fitted with the server's ``/tokenize``, in the order of `TextQuestions.names_of_samples`.

    Args:
        at_once: requests.
        done: called for each.
    """
    gate = asyncio.Semaphore(at_once)

    async def count(case: Case) -> int:
        return len(await endpoint.tokenize(case.prompt()))

    async def one(name: str, tokens: int, index: int) -> Case:
        question = asked.question(name, index)

        def make(question: Question, units: int) -> Case:
            return to_case(question, name, tokens, index, units, asked.form, asked.slack)

        async with gate:
            units = await fit(partial(make, question.last or question), tokens, count)
        done()
        return make(question, units)

    return list(await asyncio.gather(*(one(*key) for key in asked.names_of_samples())))
