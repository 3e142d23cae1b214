"""Conversations that the soak's clients lead turn by turn, on a server that is told where the turns end.

They go on with what was answered. Meanwhile their last question is asked again, by users with other salts, too; earlier
questions are edited; and others branch off.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any

from benchmarks.harness.questions import Question, random_words

BLOCK = 32
"""Tokens of a block of uncompressed KV on the soaks' servers."""
SALTS = (None, "one", "other")
"""Values of ``cache_salt``; what is cached with one is found with no other."""
LIVE = 4
"""Conversations that go on side by side: few, so that some of what they leave is still there for their next turns."""
SHARES = (0.1, 0.25, 0.5)
SYSTEM, QUESTION, ANSWER = (20, 60), (5, 50), (4, 30)
"""Fewest and most words, or tokens, of each."""
GOES_ON, AGAIN, BEGINS = "goes on", "again", "begins"
EDITED, BRANCHED, OTHER = "edited", "branched", "other policy"
WEIGHTS = {GOES_ON: 58, AGAIN: 15, BEGINS: 6, EDITED: 6, BRANCHED: 7, OTHER: 8}


@dataclass(frozen=True)
class Turn:
    """A question, and what was said before it.

    Attributes:
        said: the system text, then the user's words and the answers to them; the last is the question.
        tokens: of the answer.
    """

    said: tuple[str, ...]
    tokens: int

    @property
    def is_later(self) -> bool:
        """Whether there was another one before."""
        return len(self.said) > 2

    @property
    def ends(self) -> list[int]:
        """Words up to the end of the system text, and of each answer; each of them is at least one token."""
        return list(accumulate(len(part.split()) for part in self.said))[:-1:2]

    def is_found(self, cached: int) -> bool:
        """Whether so many cached tokens are what eviction has left of several turns, rather than whole blocks."""
        return cached in self.ends[1:] and cached % BLOCK > 0

    def prompt(self, endpoint: str) -> dict[str, Any]:
        """The fields of a body that hold the text."""
        if endpoint == "completions":
            return {"prompt": " ".join(self.said)}
        users = [
            {"role": role, "content": text}
            for role, text in zip(cycle(("user", "assistant")), self.said[1:], strict=False)
        ]
        return {"messages": [{"role": "system", "content": self.said[0]}, *users]}


@dataclass(eq=False)
class Conversation:
    """One that goes on.

    Attributes:
        endpoint: "completions" or "chat".
        salt: its ``cache_salt``.
        policy, budget: by which its turns are evicted.
        turn: the last one.
    """

    endpoint: str
    salt: str | None
    policy: str
    budget: float
    turn: Turn


class Conversations:
    """Those that go on; further ones take the place of what has grown too long.

    Args:
        seed: of what is said; what comes when depends on when answers come, too.
        longest: words of the longest prompt.
        policies: that requests may name.
        by_turns: those among them that can evict a prompt part by part.
    """

    def __init__(self, seed: int, longest: int, policies: Sequence[str], by_turns: Sequence[str]):
        self._choose = random.Random(f"conversations {seed}")
        self._longest, self._policies, self._by_turns = longest, policies, by_turns
        self._systems = [self._words(*SYSTEM) for _ in SALTS]
        self._live: list[Conversation] = []
        self._answers: dict[Turn, str] = {}

    def next(self) -> Question:
        """What is asked next."""
        choose = self._choose
        if len(self._live) < LIVE:
            return self._begin()
        conversation = choose.choice(self._live)
        how = choose.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if how == GOES_ON and conversation.turn not in self._answers:
            how = AGAIN  # its answer is still on the way, or its client has left
        if how == BEGINS:
            return self._begin(in_place_of=conversation)
        if how == OTHER:
            return self._with_another_policy(conversation)
        if how == AGAIN:
            salt = choose.choice(SALTS) if choose.random() < 0.2 else conversation.salt
            return self._question(how, conversation, salt)
        if how == GOES_ON:
            return self._go_on(conversation)
        return self._go_back(how, conversation)

    def hear(self, turn: Turn, answer: str) -> str:
        """A turn was answered; what was answered to it at first, with which its conversation goes on."""
        return self._answers.setdefault(turn, answer)

    def _begin(self, in_place_of: Conversation | None = None) -> Question:
        choose = self._choose
        if in_place_of is not None:
            self._live.remove(in_place_of)
        policy, budget = choose.choice(self._by_turns), choose.choice(SHARES)
        turn = self._turn((choose.choice(self._systems),))
        endpoint = choose.choice(("completions", "chat"))
        self._live.append(Conversation(endpoint, choose.choice(SALTS), policy, budget, turn))
        return self._question(BEGINS, self._live[-1], self._live[-1].salt)

    def _go_on(self, conversation: Conversation) -> Question:
        answer = " ".join(self._answers[conversation.turn].split())
        said = *conversation.turn.said, answer
        if sum(len(text.split()) for text in said) + max(QUESTION) > self._longest:
            return self._begin(in_place_of=conversation)
        conversation.turn = self._turn(said)
        return self._question(GOES_ON, conversation, conversation.salt)

    def _go_back(self, how: str, conversation: Conversation) -> Question:
        """Another question in the place of an earlier one: of the conversation itself, or of a branch beside it."""
        said = conversation.turn.said
        turn = self._turn(said[: self._choose.randrange(1, len(said), 2)])
        if how == BRANCHED:
            others = [other for other in self._live if other is not conversation]
            self._live.remove(self._choose.choice(others))
            conversation = replace(conversation)
            self._live.append(conversation)
        conversation.turn = turn
        return self._question(how, conversation, conversation.salt)

    def _with_another_policy(self, conversation: Conversation) -> Question:
        policy = self._choose.choice(self._policies)
        fields: dict[str, Any] = {"kv_eviction": policy, "kv_budget": self._choose.choice(SHARES)}
        if policy in self._by_turns:
            fields["kv_turns"] = conversation.turn.ends
        return replace(self._question(OTHER, conversation, conversation.salt), fields=fields, turn=None)

    def _question(self, how: str, conversation: Conversation, salt: str | None) -> Question:
        turn, endpoint = conversation.turn, conversation.endpoint
        fields = {"kv_eviction": conversation.policy, "kv_budget": conversation.budget, "kv_turns": turn.ends}
        prompt = turn.prompt(endpoint)
        return Question(f"conversation, {how}", endpoint, prompt, turn.tokens, fields, salt, turn)

    def _turn(self, said: tuple[str, ...]) -> Turn:
        return Turn((*said, self._words(*QUESTION)), self._choose.randint(*ANSWER))

    def _words(self, fewest: int, most: int) -> str:
        return random_words(self._choose, self._choose.randint(fewest, most))
