"""Chats of several turns: stock vLLM with its prefix cache, policy full, and policies that evict, at once or by turns.

All sides have the same KV memory and their prefix cache on, and run one after the other. Each turn's prompt is the chat
so far, with the side's own answers, and new words of the user. Sides "by turns" say in `kv_turns` where answers end, so
that each turn is compressed once.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from statistics import median

import httpx
from rich.table import Table

from benchmarks.harness import command, documents
from benchmarks.harness.chats import CHEAP, EVICTING, FULL, REPEATING, SCENARIOS, TURNS, Scenario
from benchmarks.harness.command import Benchmark, Round
from benchmarks.harness.documents import Answer, Run, ask
from benchmarks.harness.load import POLL_SECONDS, page_bytes
from benchmarks.harness.measure import Estimate, estimate, paired_ratio
from benchmarks.harness.scenarios import STOCK, Target
from benchmarks.harness.server import Server
from benchmarks.harness.tables import typical


def make_server(name: str, scenario: Scenario, side: str, threads: int | None) -> Server:
    """The server of a side, not started yet."""
    flags = [] if side == STOCK else ["--kv-eviction", side.removesuffix(TURNS)]
    if side not in (STOCK, FULL):
        flags += ["--kv-budget", f"{scenario.budget:g}"]
    return documents.make_server(f"chat-{name}-{side}", scenario, flags, threads)


class Chat:
    """One chat: what was said so far, and the answers to that.

    Args:
        by_turns: whether the server is told where turns end.
    """

    def __init__(self, scenario: Scenario, words: Sequence[Sequence[int]], by_turns: bool = False):
        self._scenario, self._words, self._by_turns = scenario, words, by_turns
        self._said: list[int] = []
        self.answers: list[Answer] = []

    async def go_on(self, client: httpx.AsyncClient, server: Server) -> None:
        """The next turn."""
        turn = len(self.answers)
        self._said += self._words[turn]
        ends = self._scenario.ends(turn) if self._by_turns else []
        fields = {"kv_turns": ends} if ends else None
        length = self._scenario.answer_len
        self.answers.append(await ask(client, server, self._said, None, length, fields))
        self._said += self.answers[-1].tokens


async def lead(
    client: httpx.AsyncClient, server: Server, scenario: Scenario, seed: int, by_turns: bool = False
) -> list[Answer]:
    """Lead all chats from their first turns to their last; the answers, chat after chat."""
    chats = [Chat(scenario, scenario.words(seed, chat), by_turns) for chat in range(scenario.chats)]
    for chat, _ in scenario.order():
        await chats[chat].go_on(client, server)
    return [answer for chat in chats for answer in chat.answers]


async def ask_last(
    client: httpx.AsyncClient, server: Server, scenario: Scenario, seed: int, by_turns: bool = False
) -> list[Answer]:
    """Ask the last questions of all chats at once, of which nothing was sent before; the answers."""
    ends = scenario.ends(scenario.turns - 1) if by_turns else []
    fields = {"kv_turns": ends} if ends else None
    histories = [scenario.history(seed, chat) for chat in range(scenario.chats)]
    asked = [ask(client, server, prompt, None, scenario.answer_len, fields) for prompt in histories]
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


async def drive(server: Server, scenario: Scenario, side: str, number: int) -> Run:
    """Send a load to one side that has nothing cached; other rounds have other words."""
    how = ask_last if scenario.at_once else lead
    # To read the metrics takes some of the machine: only where it is asked how many run.
    watching = asyncio.create_task(watch(server)) if scenario.at_once else None
    run = await documents.measured(
        server, lambda client: how(client, server, scenario, number, side.endswith(TURNS)), reset=True
    )
    if watching is None:
        return run
    watching.cancel()
    return replace(run, most_running=await watching)


def first(scenario: Scenario) -> Scenario:
    """What a server is tried with before it is measured."""
    return replace(scenario, chats=1, turns=min(scenario.turns, 2))


def over_stock(rounds: Sequence[Round], what: Callable[[Run], float], side: str) -> Estimate:
    """A figure of a side over that of stock, round by round."""
    return paired_ratio([what(one[""][side]) for one in rounds], [what(one[""][STOCK]) for one in rounds])


def later_wait(scenario: Scenario, run: Run) -> float:
    """Median seconds until the first token of all turns but each chat's first."""
    return median(wait for index, wait in enumerate(run.first_token) if index % scenario.turns)


def figures(name: str, scenario: Scenario, rounds: Sequence[Round]) -> list[Target]:
    """What the scenario should reach, and what it did."""

    def ratio(what: Callable[[Run], float], side: str) -> Estimate:
        return over_stock(rounds, what, side)

    if name == "agents":
        return agents_figures(scenario, rounds)
    if name == "crowd":
        return [Target("chats at once, over stock", ratio(lambda run: run.most_running, EVICTING), 2.0)]

    def wait(run: Run) -> float:
        return later_wait(scenario, run)

    first = "time to first token from the second turn on, over stock"
    return [
        Target("all turns, full, over stock", ratio(lambda run: run.wall, FULL), 1.1, True),
        Target(f"{first}, full", ratio(wait, FULL), 1.1, True),
        Target(f"{first}, {EVICTING}", ratio(wait, EVICTING), 1.3, True),
    ]


def agents_figures(scenario: Scenario, rounds: Sequence[Round]) -> list[Target]:
    """What chats that are compressed turn by turn should reach."""

    def of(what: Callable[[Run], float], side: str) -> Estimate:
        return estimate([what(one[""][side]) for one in rounds])

    def found(run: Run) -> float:
        return run.cached / scenario.known_len

    def wait(run: Run) -> float:
        return later_wait(scenario, run)

    def held(run: Run) -> float:
        return run.held * page_bytes(scenario.dtype) / scenario.whole_bytes

    def held_with_tails(run: Run) -> float:
        return held(run) + run.uncompressed * page_bytes(scenario.dtype) / scenario.whole_bytes

    first = "time to first token from the second turn on, over stock"
    speed = over_stock(rounds, lambda run: 1 / run.wall, CHEAP)
    return [
        Target(f"of what chats said before, found by {CHEAP}", of(found, CHEAP), 0.97),
        Target("the same, found by stock", of(found, STOCK), 0.05, True),
        Target(f"{first}, {CHEAP}", over_stock(rounds, wait, CHEAP), 0.15, True),
        Target(f"{first}, {REPEATING}", over_stock(rounds, wait, REPEATING), 0.25, True),
        Target(f"KV of chats that are idle, {CHEAP}, over all of it", of(held, CHEAP), 0.3, True),
        Target("the same, with last questions and answers", of(held_with_tails, CHEAP), 0.36, True),
        Target(f"output tokens/s, {CHEAP}, over stock", speed, 2.5),
    ]


def table(title: str, scenario: Scenario, rounds: Sequence[Round]) -> Table:
    """Medians over the rounds."""
    columns = {
        "seconds": (lambda run: run.wall, ".1f"),
        "first token, median s": (lambda run: median(run.first_token), ".3f"),
        "found": (lambda run: run.cached, ".0f"),
        "of what was said": (
            lambda run: run.cached / scenario.known_len if scenario.known_len else nan,
            ".1%",
        ),
        "preempted": (lambda run: run.preemptions, ".0f"),
        "at once": (lambda run: run.most_running if scenario.at_once else nan, ".0f"),
    }
    sides = {side: [one[""][side] for one in rounds] for side in scenario.sides}
    return typical(f"{title}, budget {scenario.budget:g}", sides, columns)


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


BENCHMARK = Benchmark("chat", __doc__, SCENARIOS, SIZES, make_server, first, drive, table, figures)

if __name__ == "__main__":
    sys.exit(command.main(BENCHMARK))
