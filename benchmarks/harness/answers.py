"""The demo's questions about long texts, asked with the whole KV cache and with parts of it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_kvevict.quality.cases import Case, Generated
from vllm_kvevict.quality.endpoint import Endpoint
from vllm_kvevict.quality.fitting import TextQuestions, cases
from vllm_kvevict.quality.results import FULL, Column
from vllm_kvevict.quality.run import asked_fields, columns

REAL_TASKS, REAL_SEED = ("number", "multikey", "chat-needle"), 1
"""Questions that the model can answer with its full cache."""
REAL_TOKENS = 1024
"""Of the texts in which a real model is asked for something."""
SLACK = 8
QUESTION_WIDTH, REPLY_WIDTH = 48, 32
CAPTION = "a few questions are no measurement: see docs/MEASURING-QUALITY.md"


@dataclass(frozen=True)
class Asked:
    """A question with the reply of each column."""

    case: Case
    replies: Sequence[str]


def kept(policy: str, budget: float) -> list[Column]:
    """What of the KV cache stays: all, what the policy keeps, and as much of the first and last tokens."""
    return columns([FULL, policy, "streaming-llm"], [budget], ["prompt"])


def needle_question(tokens: int) -> list[Case]:
    """A question that the needle model can answer, about a text of so many words."""
    # The record lies where the last tokens do not reach.
    return list(Generated(["multikey"], [tokens], [0.3], samples=1, seed=0, instruct=False, slack=SLACK))


async def real_questions(endpoint: Endpoint) -> list[Case]:
    """Questions on real text that a small real model can answer; the server counts the tokens."""
    asked = TextQuestions(REAL_TASKS, [REAL_TOKENS], 1, REAL_SEED, "chat", {}, SLACK)
    return await cases(asked, endpoint, at_once=1, done=lambda: None)


async def ask(endpoint: Endpoint, questions: Sequence[Case], asked: Sequence[Column]) -> list[Asked]:
    """Ask all questions with each column, one after another."""
    found = []
    for case in questions:
        replies = [
            await endpoint.ask(case.prompt(), case.max_tokens, asked_fields(column)) for column in asked
        ]
        found.append(Asked(case, [reply.text for reply in replies]))
    return found


def answers_table(model: str, asked: Sequence[Column], found: Sequence[Asked]) -> Table:
    """What was asked, what the text says, and what came back."""
    table = Table(title=f"what {model} answers", caption=CAPTION, show_lines=True)
    table.add_column("question", max_width=QUESTION_WIDTH)
    table.add_column("the text says")
    for column in asked:
        table.add_column("full cache" if column.budget is None else f"{column.policy} {column.budget:g}")
    for one in found:
        replies = [_marked(one.case, reply) for reply in one.replies]
        table.add_row(one.case.question, "\n".join(one.case.expected), *replies)
    return table


def _marked(case: Case, reply: str) -> Group:
    verdict = Text("right", "green") if case.score(reply) == 1 else Text("wrong", "red")
    return Group(Text(textwrap.shorten(reply, REPLY_WIDTH, placeholder="...")), verdict)
