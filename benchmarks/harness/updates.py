"""Weights that change under load: the questions that are asked meanwhile, how weights change, and who must answer what.

Nothing here needs a server.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.questions import Question, random_words
from benchmarks.harness.traffic import EXPECTED, LEFT, WRONG, Outcome

DOCUMENTS = (75, 110, 150, 205, 260, 330)
"""Words of each, no multiple of a block of uncompressed KV, so that hits tell which cache they are of."""
CHATS, TURNS = 3, 3
STALE, ABORTED = "not as with nothing cached", "aborted by a pause"
MIXABLE, WHOLE, MIXED = (
    "changed on the way",
    "paused, of one set of weights",
    "paused, of several sets of weights",
)
"""What becomes of a request, on top of what traffic knows. Those that run on with other weights are not compared."""
GOOD = (EXPECTED, LEFT, MIXABLE, WHOLE, ABORTED)
"""What may become of one."""


def about_documents(policies: Sequence[str], seed: int) -> list[Question]:
    """Questions about documents, some of which are evicted on their own, and short ones about nothing.

    All policies are asked in turns. Three questions each share a compressed prefix.
    """
    choose = random.Random(seed)
    evicting = [policy for policy in policies if policy != "full"]
    choose.shuffle(evicting)
    # The policy that is made for documents, and the usual one, are always among them.
    ahead = [policy for policy in ("kvzip", "ada-snapkv") if policy in evicting]
    turn = iter(ahead + [policy for policy in evicting if policy not in ahead] * 2)
    questions = []
    for words in DOCUMENTS:
        document = random_words(choose, words)
        for policy in (next(turn), next(turn)):
            fields = {**_fields(policy, choose), "kv_prefix_len": words}
            questions += [_about(document, "compressed prefix", fields, choose) for _ in range(3)]
        for policy in ("full", next(turn), next(turn), next(turn)):
            questions.append(_about(document, "prefix", _fields(policy, choose), choose))
    for policy in ("full", *evicting[:5]):
        questions.append(_about("", "short", _fields(policy, choose), choose))
    return questions


def _about(document: str, kind: str, fields: Mapping[str, Any], choose: random.Random) -> Question:
    text = f"{document} {random_words(choose, choose.randint(5, 60))}".strip()
    return Question(kind, "completions", {"prompt": text}, choose.choice((8, 12, 40)), fields)


def _fields(policy: str, choose: random.Random) -> dict[str, Any]:
    return {"kv_eviction": policy} | ({"kv_budget": choose.choice((0.2, 0.4))} if policy != "full" else {})


class Chat:
    """One chat, in which each turn repeats what was said before.

    Args:
        policy: by which all its turns are evicted.
        seed: of what the user says.
    """

    def __init__(self, policy: str, seed: int):
        self._choose = random.Random(seed)
        self._fields = _fields(policy, self._choose)
        self._messages: list[dict[str, str]] = []

    def next(self) -> Question:
        """The next turn."""
        said = random_words(self._choose, self._choose.randint(20, 60))
        self._messages.append({"role": "user", "content": said})
        return Question("chat", "chat", {"messages": list(self._messages)}, 24, self._fields)

    def answered(self, text: str) -> None:
        """What was answered to it."""
        self._messages.append({"role": "assistant", "content": text})


@dataclass(frozen=True)
class Update:
    """One way to change the weights of a server that runs.

    Attributes:
        pause: vLLM's mode; None: it does not pause, weights change between two steps.
        clears: the pause empties the cache itself, before the weights change.
        reset: the cache is emptied after they have changed: None, "soft" or "hard", which preempts all that run.
    """

    pause: str | None
    clears: bool = False
    reset: str | None = None

    def __str__(self) -> str:
        pause = f"pause {self.pause}" if self.pause else "no pause"
        how = "cleared by the pause" if self.clears else f"{self.reset} reset" if self.reset else "no reset"
        return f"{pause}, {how}"


UPDATES = (
    Update("abort", clears=True),
    Update("abort", reset="soft"),
    Update("wait", clears=True),
    Update("wait", reset="soft"),
    Update("keep", reset="soft"),
    Update("keep", reset="hard"),
    Update(None, reset="soft"),
    Update(None, reset="hard"),
)
"""All after which nobody may begin with what was read before. A pause that keeps requests clears nothing."""
WITHOUT_RESET = tuple(Update(pause) for pause in ("abort", "wait", "keep", None))
"""The control, whose soak must find answers that began with what was read before."""


def in_turns(updates: Sequence[Update], seed: int) -> Iterator[Update]:
    """Without end: all of them in a random order, then in another one."""
    choose = random.Random(seed)
    while True:
        yield from choose.sample(updates, len(updates))


class Timeline:
    """Which weights may answer a request; a moment is a number.

    At even moments requests meet one set of weights only. At odd ones an update has begun: they may meet the old
    weights, the new ones or both.

    Attributes:
        met: for each moment until now, the weights that a request may meet which is sent then.
    """

    def __init__(self, weights: int = 0):
        self.met = [weights]
        self._updates: dict[int, Update] = {}

    @property
    def moment(self) -> int:
        """Now."""
        return len(self.met) - 1

    @property
    def weights(self) -> int:
        """That requests meet which are sent now."""
        return self.met[-1]

    def begin(self, update: Update) -> None:
        """An update begins."""
        self.met.append(self.weights)
        self._updates[self.moment] = update

    def settle(self, weights: int) -> None:
        """From now on requests meet only these."""
        self.met.append(weights)

    def is_settled(self, sent: int) -> bool:
        """Whether a request that was sent at this moment has met the weights of now, and no others."""
        return sent == self.moment and sent % 2 == 0

    def pauses_since(self, sent: int) -> set[str | None]:
        """How the server paused for the updates since this moment."""
        return {update.pause for moment, update in self._updates.items() if sent <= moment}


def judge(timeline: Timeline, sent: int, outcome: Outcome, expected: Sequence[str]) -> str:
    """What became of a request that has just ended.

    Args:
        timeline: as it is now.
        sent: its moment when the request was sent.
        outcome: as read by the client.
        expected: the answers of all weights with nothing cached.

    Returns:
        What traffic says, unless the answer has to be compared, or an update explains what is missing of it.
    """
    pauses = timeline.pauses_since(sent)
    # A stream that is aborted before its first token has no choice at all.
    aborted = outcome.answer is not None and outcome.answer.ends in (["abort"], [])
    if outcome.result == WRONG and aborted and "abort" in pauses:
        return ABORTED
    if outcome.result != EXPECTED or outcome.answer is None:
        return outcome.result
    if timeline.is_settled(sent):
        return EXPECTED if outcome.answer.text == expected[timeline.weights] else STALE
    if pauses & {None, "keep"}:  # it runs on with other weights
        return MIXABLE
    # A pause lets all that run end, or aborts it; the others begin after it.
    return WHOLE if outcome.answer.text in {expected[weights] for weights in timeline.met[sent:]} else MIXED


def found_in(cached: int) -> str:
    """Which cache the first tokens of a prompt were found in."""
    if not cached:
        return "nothing"
    return "compressed prefix" if cached % BLOCK else "uncompressed prefix"
