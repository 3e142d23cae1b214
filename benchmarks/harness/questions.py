"""What the soaks' clients ask: random texts, questions, and bodies of requests."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.harness.conversations import Turn


def random_words(choose: random.Random, length: int) -> str:
    """A text of so many words, each of which is at least one token of any tokenizer."""
    return " ".join(f"w{choose.randrange(8, 500)}" for _ in range(length))


def body_of(model: str, tokens: int, stream: bool = False, **more: Any) -> dict[str, Any]:
    """A request for an answer of so many tokens, always the same one, and more fields."""
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


@dataclass(frozen=True, eq=False)
class Question:
    """What a client asks; the same only as itself.

    Attributes:
        kind: for the tally.
        endpoint: "completions" or "chat".
        prompt: the fields that hold the text.
        tokens: of the answer.
        fields: of ``vllm_xargs``.
        salt: ``cache_salt`` of the client.
        turn: of a conversation, whose answer it asks for.
    """

    kind: str
    endpoint: str
    prompt: Mapping[str, Any]
    tokens: int
    fields: Mapping[str, Any]
    salt: str | None = None
    turn: "Turn | None" = None

    def body(self, model: str, stream: bool = False) -> dict[str, Any]:
        """Of the request."""
        salt = {"cache_salt": self.salt} if self.salt else {}
        return body_of(model, self.tokens, stream, **self.prompt, vllm_xargs=dict(self.fields), **salt)
