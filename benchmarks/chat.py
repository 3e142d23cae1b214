"""Chats of several turns: stock vLLM with its prefix cache, policy full, and policies that evict, at once or by turns.

All sides have the same KV memory and their prefix cache on, and run one after the other. Each turn's prompt is the chat
so far, with the side's own answers, and new words of the user. Sides "by turns" say in `kv_turns` where answers end, so
that each turn is compressed once.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import median
from typing import Any

import httpx

from benchmarks.harness.bench import measure, parse
from benchmarks.harness.documents import Answer, Run, ask, environment, measured
from benchmarks.harness.load import POLL_SECONDS, page_bytes
from benchmarks.harness.measure import Estimate, estimate
from benchmarks.harness.scenarios import STOCK, Comparison, Round, Target, over, token_bytes
from benchmarks.harness.server import Server, run_benchmark
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from benchmarks.harness.tables import Columns

FULL, EVICTING = "full", "ada-snapkv"
SIDES = (STOCK, FULL, EVICTING)
TURNS = " by turns"
CHEAP, REPEATING = EVICTING + TURNS, "kvzip" + TURNS


@dataclass(frozen=True)
class Scenario(Comparison):
    """Chats of several turns.

    Attributes:
        chats: how many.
        turns: of each.
        turn_len, answer_len: tokens of the user's words and of the answer in each turn.
        system_len: tokens of each chat's system text and tools.
        in_turns: whether all chats have their first turn before any has its second.
        at_once: whether all chats ask their last question together, with all that was said before it; else they are led
            from the first turn on, one after the other.
        budget: share of a prompt that is kept where it is evicted.
        sides: that run.
    """

    chats: int
    turns: int
    turn_len: int
    answer_len: int
    system_len: int = 0
    in_turns: bool = False
    at_once: bool = False
    budget: float = 0.2
    sides: tuple[str, ...] = SIDES

    @property
    def max_len(self) -> int:
        """Tokens of a whole chat."""
        return self.system_len + self.turns * (self.turn_len + self.answer_len)

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
        return [choose.choices(range(FIRST_WORD, VOCAB), k=length) for length in lengths]

    def ends(self, turn: int) -> list[int]:
        """Where the parts of the prompt of a turn end, which is 0 for the first: the system text, and each answer."""
        each = self.turn_len + self.answer_len
        return [end for end in range(self.system_len, self.system_len + turn * each + 1, each) if end]

    def fields(self, turn: int) -> dict[str, Any]:
        """Of ``vllm_xargs``, where the server is told where turns end."""
        ends = self.ends(turn)
        return {"kv_turns": ends} if ends else {}

    @property
    def known_len(self) -> int:
        """Tokens of all prompts that were sent or received before."""
        if self.at_once:
            return 0
        each = self.turn_len + self.answer_len
        return self.chats * sum(self.system_len + turn * each for turn in range(1, self.turns))

    def history(self, seed: int, chat: int) -> list[int]:
        """A chat up to its last question, with random words for answers."""
        choose = random.Random(f"history {seed} {chat}")
        return choose.choices(range(FIRST_WORD, VOCAB), k=self.max_len - self.answer_len)

    def first(self) -> "Scenario":
        """One chat."""
        return replace(self, chats=1, turns=min(self.turns, 2))

    def server(self, side: str, threads: int | None) -> Server:
        """The server of a side, not started yet."""
        flags = [] if side == STOCK else ["--kv-eviction", side.removesuffix(TURNS)]
        if side not in (STOCK, FULL):
            flags += ["--kv-budget", f"{self.budget:g}"]
        return self.serve(side, flags, environment(threads))

    async def send(self, server: Server, turn: str, number: int) -> Run:
        """All chats, with nothing cached at first."""
        by_turns = turn.endswith(TURNS)
        if not self.at_once:
            return await measured(server, lambda client: lead(client, server, self, number, by_turns), True)
        # To read the metrics takes some of the machine: only where it is asked how many run.
        watching = asyncio.create_task(watch(server))
        run = await measured(server, lambda client: ask_last(client, server, self, number), True)
        watching.cancel()
        return replace(run, most_running=await watching)

    def columns(self) -> Columns:
        """Waits, and what was found in the cache."""
        known = self.known_len or nan
        return {
            "seconds": (lambda run: run.wall, ".1f"),
            "first token, median s": (lambda run: median(run.first_token), ".3f"),
            "found": (lambda run: run.cached, ".0f"),
            "of what was said": (lambda run: run.cached / known, ".1%"),
            "preempted": (lambda run: run.preemptions, ".0f"),
            "at once": (lambda run: run.most_running if self.at_once else nan, ".0f"),
        }

    def later_wait(self, run: Run) -> float:
        """Median seconds until the first token of all turns but each chat's first."""
        return median(wait for index, wait in enumerate(run.first_token) if index % self.turns)

    def targets(self, name: str, rounds: Sequence[Round]) -> list[Target]:
        """What the scenario should reach, and what it did."""
        if name == "agents":
            return self._of_agents(rounds)
        if name == "crowd":
            running = over(rounds, lambda run: run.most_running, EVICTING, STOCK)
            return [Target("chats at once, over stock", running, 2.0)]
        return [
            Target("all turns, full, over stock", over(rounds, lambda run: run.wall, FULL, STOCK), 1.1, True),
            self._waits_at_most(rounds, FULL, 1.1),
            self._waits_at_most(rounds, EVICTING, 1.3),
        ]

    def _waits_at_most(self, rounds: Sequence[Round], side: str, bound: float) -> Target:
        name = f"time to first token from the second turn on, over stock, {side}"
        return Target(name, over(rounds, self.later_wait, side, STOCK), bound, True)

    def _of_agents(self, rounds: Sequence[Round]) -> list[Target]:
        """Chats that are compressed turn by turn."""

        def of(what: Callable[[Run], float], side: str) -> Estimate:
            return estimate([what(one[side]) for one in rounds])

        def found(run: Run) -> float:
            return run.cached / self.known_len

        def held(run: Run, tails: int = 0) -> float:
            return (run.held + tails) * page_bytes(self.dtype) / self.whole_bytes

        def held_with_tails(run: Run) -> float:
            return held(run, run.uncompressed)

        speed = over(rounds, lambda run: 1 / run.wall, CHEAP, STOCK)
        return [
            Target(f"of what chats said before, found by {CHEAP}", of(found, CHEAP), 0.97),
            Target("the same, found by stock", of(found, STOCK), 0.05, True),
            self._waits_at_most(rounds, CHEAP, 0.15),
            self._waits_at_most(rounds, REPEATING, 0.25),
            Target(f"KV of chats that are idle, {CHEAP}, over all of it", of(held, CHEAP), 0.3, True),
            Target("the same, with last questions and answers", of(held_with_tails, CHEAP), 0.36, True),
            Target(f"output tokens/s, {CHEAP}, over stock", speed, 2.5),
        ]


async def lead(
    client: httpx.AsyncClient, server: Server, scenario: Scenario, seed: int, by_turns: bool = False
) -> list[Answer]:
    """Lead all chats from their first turns to their last, with the server's own answers.

    Args:
        by_turns: whether the server is told where turns end.

    Returns:
        The answers, chat after chat.
    """
    words = [scenario.words(seed, chat) for chat in range(scenario.chats)]
    said: list[list[int]] = [[] for _ in words]
    answers: list[list[Answer]] = [[] for _ in words]
    for chat, turn in scenario.order():
        said[chat] += words[chat][turn]
        fields = scenario.fields(turn) if by_turns else None
        answer = await ask(client, server, said[chat], None, scenario.answer_len, fields)
        answers[chat].append(answer)
        said[chat] += answer.tokens
    return [answer for chat in answers for answer in chat]


async def ask_last(client: httpx.AsyncClient, server: Server, scenario: Scenario, seed: int) -> list[Answer]:
    """Ask the last questions of all chats at once, of which nothing was sent before; the answers."""
    histories = [scenario.history(seed, chat) for chat in range(scenario.chats)]
    asked = [ask(client, server, prompt, None, scenario.answer_len) for prompt in histories]
    return list(await asyncio.gather(*asked))


async def watch(server: Server) -> int:
    """The most requests seen running at once, until this is cancelled."""
    most = 0
    try:
        while True:
            most = max(most, (await server.snapshot()).running)
            await asyncio.sleep(POLL_SECONDS)
    except asyncio.CancelledError:
        return most


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

SIZES = {
    "chats": "how many",
    "turns": "of each",
    "turn_len": "tokens of the user's words in each",
    "answer_len": "tokens of each answer",
    "system_len": "tokens of each chat's system text",
    "pool": "whole chats that the KV memory holds",
    "rounds": "how often every side runs",
}
"""What of a scenario can be changed."""


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[Any, dict[str, Scenario]]:
    """The options, and the scenarios to run, by name."""
    return parse("chat", __doc__, SCENARIOS, SIZES, argv)


def main() -> int:
    """Run scenarios; the exit code."""
    return run_benchmark(measure("chat", *parse_arguments(), SCENARIOS))


if __name__ == "__main__":
    sys.exit(main())
