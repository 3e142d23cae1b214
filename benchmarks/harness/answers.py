"""The demo's question about a long text, asked with the whole KV cache and with parts of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI
from rich.table import Table
from rich.text import Text

from benchmarks.harness.server import Server
from vllm_kvevict.quality.tasks import Sample, make, score


@dataclass(frozen=True)
class Question:
    """A question, and how much of the text's KV the server keeps: a policy with a budget, or all of it."""

    sample: Sample
    policy: str
    budget: float | None = None


def make_questions(tokens: int, policy: str, budget: float) -> list[Question]:
    """One question about a text of so many tokens: full cache, the policy, and as much of the last tokens."""
    # The record lies where the last tokens do not reach.
    sample = make("multikey", tokens, random.Random(0), depth=0.3)
    return [
        Question(sample, "full"),
        Question(sample, policy, budget),
        Question(sample, "streaming-llm", budget),
    ]


async def ask(server: Server, question: Question) -> str:
    """The server's reply."""
    fields: dict[str, str | float] = {"kv_eviction": question.policy}
    if question.budget is not None:
        fields["kv_budget"] = question.budget
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=server.model,
            messages=[
                {"role": "system", "content": question.sample.context},
                {"role": "user", "content": question.sample.question},
            ],
            max_tokens=16,
            temperature=0,
            extra_body={"vllm_xargs": fields},
        )
    return answer.choices[0].message.content or ""


def answers_table(questions: Sequence[Question], replies: Sequence[str]) -> Table:
    """What was asked and what came back."""
    sample = questions[0].sample
    table = Table(
        title=f"“{sample.question}” about a text of {len(sample.context.split()):,} words",
        caption=f"the text says: “{sample.answer} .”, {sample.depth:.0%} into it",
    )
    table.add_column("KV kept")
    table.add_column("reply")
    table.add_column("")
    for question, reply in zip(questions, replies, strict=True):
        right = score(sample, reply) == 1
        kept = question.policy if question.budget is None else f"{question.policy} {question.budget:g}"
        verdict = Text("right", "green") if right else Text("wrong", "red")
        table.add_row(kept, " ".join(reply.split()), verdict)
    return table
