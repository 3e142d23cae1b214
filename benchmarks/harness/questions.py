"""The loads of the prefix benchmark: documents, the questions about them, the memory they run in, and the sides."""

import random
from dataclasses import dataclass, replace

from benchmarks.harness.scenarios import BLOCK, STOCK, token_bytes
from benchmarks.harness.sides import FIRST_WORD, VOCAB

WITHOUT, WITH = "without cache", "with cache"
STOCK_WITHOUT = "stock without cache"
SIDES = (STOCK, WITHOUT, WITH)
REPEAT_ROOM = 1024
"""Tokens that a policy which reads a document again needs beside it, and more."""


@dataclass(frozen=True)
class Scenario:
    """A load and the memory it runs in.

    Attributes:
        about: shown in help and results.
        documents, document_len: how many, and tokens of each.
        questions: about each document.
        question_len, output_len: tokens.
        pool: how many whole documents with a question and its answer the KV memory holds.
        at_once: whether all questions come together; else one after the other, of each document in turn.
        budget: share of a document that is kept.
        step: ``--max-num-batched-tokens``; None for vLLM's default.
        rounds: how often every side runs.
        sides: that run.
        policy: of the sides that evict.
        room: tokens that a request may be longer than its prompt and its answer, as the policy needs them.
        sees_question: whether the whole prompt is evicted, with its question in view.
    """

    about: str
    documents: int
    document_len: int
    questions: int
    output_len: int
    pool: int
    at_once: bool
    question_len: int = 32
    budget: float = 0.2
    step: int | None = None
    rounds: int = 3
    sides: tuple[str, ...] = SIDES
    policy: str = "ada-snapkv"
    room: int = 0
    sees_question: bool = False
    dtype: str = "bfloat16"

    @property
    def max_len(self) -> int:
        """Tokens of a request."""
        return self.document_len + self.question_len + self.output_len + self.room

    def kv_bytes(self) -> int:
        """KV memory, with the one block that vLLM keeps for itself."""
        return (self.pool * -(-self.max_len // BLOCK) + 1) * BLOCK * token_bytes(self.dtype)

    def prompts(self, seed: int) -> list[list[int]]:
        """The prompts in the order in which they are sent; other seeds have other documents."""
        choose = random.Random(f"{self} {seed}")
        documents = [self._tokens(choose, self.document_len) for _ in range(self.documents)]
        return [
            documents[number] + self._tokens(choose, self.question_len)
            for _ in range(self.questions)
            for number in range(self.documents)
        ]

    def _tokens(self, choose: random.Random, count: int) -> list[int]:
        return choose.choices(range(FIRST_WORD, VOCAB), k=count)


ONE = Scenario(
    "sixteen questions about one document at once",
    documents=1,
    document_len=8192,
    questions=16,
    output_len=256,
    pool=2,
    at_once=True,
)
ONE_BY_ONE = replace(ONE, about="one after the other", output_len=16, at_once=False)
UNIQUE = Scenario(
    "no document is asked twice, in memory for four",
    documents=24,
    document_len=2016,
    questions=1,
    output_len=256,
    pool=4,
    at_once=True,
    rounds=12,
    # What eviction is worth beside stock vLLM under this load is measured by throughput pool-bound.
    sides=(WITHOUT, WITH),
)
SCENARIOS = {
    "document": ONE,
    "documents": replace(
        ONE_BY_ONE,
        about="sixteen documents, asked in turns, in memory for four of them whole",
        documents=16,
        document_len=4096,
        questions=3,
        pool=4,
        step=8192,
    ),
    "unique": UNIQUE,
    "exact": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, each in view when its prompt is evicted",
        pool=3,
        sees_question=True,
    ),
    "unrelated": replace(
        UNIQUE,
        about="prompts that share nothing, evicted with their question in view, in memory for four",
        sees_question=True,
    ),
    "compressed": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, on what kvzip keeps of it",
        sides=(STOCK_WITHOUT, WITH),
        policy="kvzip",
        room=REPEAT_ROOM,
    ),
    "long": replace(
        ONE_BY_ONE,
        about="two questions about one document of 32k tokens, one after the other",
        document_len=32768,
        questions=2,
        sides=(STOCK_WITHOUT, WITH),
    ),
}
