"""Requests that begin with a cached prefix, and the same requests that read all of their prompt."""

import random
from dataclasses import dataclass
from typing import Any

from tests.engine.support.running import VOCAB, Ask
from vllm_kvevict.policies import available

POLICIES = [policy for policy in available() if policy != "full"]
BASE: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}


@dataclass
class Question(Ask):
    """A request whose first ``prefix_len`` tokens depend on ``seed`` alone, and the others on ``question``."""

    question: int = 0

    @property
    def prompt(self) -> list[int]:
        assert self.prefix_len is not None
        document, question = random.Random(self.seed), random.Random(f"{self.seed} {self.question}")
        chosen = [document.randrange(8, VOCAB) for _ in range(self.prefix_len)]
        return chosen + [question.randrange(8, VOCAB) for _ in range(self.length - self.prefix_len)]


def questions(policy: str, seed: int, prefix_len: int = 200, max_tokens: int = 12) -> list[Question]:
    """Three about one document; the last has a single token, and one ends a page."""
    lengths = (prefix_len + 20, prefix_len + 56, prefix_len + 1)
    return [
        Question(length, policy, 0.3, prefix_len, max_tokens, seed, question)
        for question, length in enumerate(lengths)
    ]


def metric(llm: Any, name: str) -> int:
    """A counter or gauge, summed over ranks."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def aborted_after(llm: Any, first: Question, second: Question, steps: int) -> tuple[list[int], bool]:
    """What the second of two requests says when the first is aborted after so many steps, and whether it was."""
    engine = llm.llm_engine
    for name, ask in (("first", first), ("second", second)):
        engine.add_request(name, {"prompt_token_ids": ask.prompt}, ask.sampling(logits=False))
    tokens: dict[str, list[int]] = {}
    was_aborted = False
    for step in range(1000):
        if step == steps and "first" not in tokens:
            engine.abort_request(["first"])
            was_aborted = True
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            return tokens["second"], was_aborted
    raise AssertionError("the second request does not end")
