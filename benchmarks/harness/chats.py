"""The chats of the chat benchmark: who says how much in which order, in how much memory, and which sides serve them."""

import random
from dataclasses import dataclass

from benchmarks.harness.scenarios import BLOCK, STOCK, token_bytes
from benchmarks.harness.sides import FIRST_WORD, VOCAB

FULL, EVICTING = "full", "ada-snapkv"
SIDES = (STOCK, FULL, EVICTING)
TURNS = " by turns"
CHEAP, REPEATING = EVICTING + TURNS, "kvzip" + TURNS


@dataclass(frozen=True)
class Scenario:
    """A load and the memory it runs in.

    Attributes:
        about: shown in help and results.
        chats: how many.
        turns: of each.
        turn_len, answer_len: tokens of the user's words and of the answer in each turn.
        system_len: tokens of each chat's system text and tools.
        in_turns: whether all chats have their first turn before any has its second.
        pool: how many whole chats the KV memory holds.
        at_once: whether all chats ask their last question together, with all that was said before it; else they are led
            from the first turn on, one after the other.
        budget: share of a prompt that is kept where it is evicted.
        sides: that run.
        rounds: how often every side runs.
        dtype: in which the servers compute and keep the KV.
    """

    about: str
    chats: int
    turns: int
    turn_len: int
    answer_len: int
    pool: int
    system_len: int = 0
    in_turns: bool = False
    at_once: bool = False
    budget: float = 0.2
    sides: tuple[str, ...] = SIDES
    rounds: int = 3
    dtype: str = "bfloat16"

    @property
    def max_len(self) -> int:
        """Tokens of a whole chat."""
        return self.system_len + self.turns * (self.turn_len + self.answer_len)

    @property
    def blocks(self) -> int:
        """Of vLLM, that the KV memory has."""
        return self.pool * -(-self.max_len // BLOCK)

    def kv_bytes(self) -> int:
        """KV memory, with the one block that vLLM keeps for itself."""
        return (self.blocks + 1) * BLOCK * token_bytes(self.dtype)

    @property
    def whole_bytes(self) -> int:
        """KV memory of all chats, whole."""
        return self.chats * self.max_len * token_bytes(self.dtype)

    def order(self) -> list[tuple[int, int]]:
        """Who speaks when, where chats are led: chat and turn."""
        chats, turns = range(self.chats), range(self.turns)
        if self.in_turns:
            return [(chat, turn) for turn in turns for chat in chats]
        return [(chat, turn) for chat in chats for turn in turns]

    def words(self, seed: int, chat: int) -> list[list[int]]:
        """What the user says in each turn of a chat, at first with the system text; the same to all sides."""
        choose = random.Random(f"{seed} {chat}")
        lengths = [self.system_len + self.turn_len, *[self.turn_len] * (self.turns - 1)]
        said = [choose.choices(range(FIRST_WORD, VOCAB), k=length) for length in lengths]
        return said

    def prompt_len(self, turn: int) -> int:
        """Tokens of the prompt of a turn."""
        return self.system_len + turn * (self.turn_len + self.answer_len) + self.turn_len

    def ends(self, turn: int) -> list[int]:
        """Where the parts of the prompt of a turn end, which is 0 for the first: the system text, and each answer."""
        each = self.turn_len + self.answer_len
        return [end for end in range(self.system_len, self.system_len + turn * each + 1, each) if end]

    @property
    def known_len(self) -> int:
        """Tokens of all prompts that were sent or received before."""
        if self.at_once:
            return 0
        return self.chats * sum(self.prompt_len(turn) - self.turn_len for turn in range(1, self.turns))

    def history(self, seed: int, chat: int) -> list[int]:
        """A chat up to its last question, with random words for answers."""
        choose = random.Random(f"history {seed} {chat}")
        count = self.max_len - self.answer_len
        return choose.choices(range(FIRST_WORD, VOCAB), k=count)


SCENARIOS = {
    "turns": Scenario(
        "two chats of eight turns, in memory for both whole",
        chats=2,
        turns=8,
        turn_len=1024,
        answer_len=64,
        pool=3,
    ),
    "crowd": Scenario(
        "twelve chats ask their last question at once, in memory for three whole",
        chats=12,
        turns=8,
        turn_len=1024,
        answer_len=64,
        pool=3,
        at_once=True,
        sides=(STOCK, EVICTING),
    ),
    "agents": Scenario(
        "16 chats of twelve turns behind 2k tokens of system text each, in memory for six whole",
        chats=16,
        turns=12,
        turn_len=256,
        answer_len=96,
        pool=6,
        system_len=2048,
        in_turns=True,
        budget=0.25,
        sides=(STOCK, EVICTING, CHEAP, REPEATING),
    ),
}
