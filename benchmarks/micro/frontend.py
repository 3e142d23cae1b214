"""What the front end adds to a chat.

In the scopes ``prefix`` and ``turns`` a server finds out where the question, or each turn, of a chat begins. Before
that vLLM renders the chat and makes tokens of it, which takes far longer. Here renderers of stock vLLM and of servers
with eviction do that in turns, in one process without an engine, with real text and the tokenizer of a real model:
a document with a question, and a chat of many turns.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.harness.measure import Estimate, estimate, timed
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import STOCK
from benchmarks.harness.tables import table
from benchmarks.micro.loop import Found, in_turns
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.texts import sentences

SCOPES = ("prefix", "turns")
DOCUMENT, CHAT = "document", "chat"
TURN = 512
"""Tokens of a turn of a chat, about."""
HAS_DTYPE = False
OPTIONS = (
    ("rounds", whole, 15, "runs of each side"),
    ("tokens", whole, [1024, 8192, 32768], "of each chat, about"),
    ("model", Path, None, f"folder of another model with a chat template (default: {checkpoint.NAME})"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """Find the model; what is wrong with the arguments."""
    arguments.model = arguments.model or checkpoint.find()
    return checkpoint.missing() if arguments.model is None else None


@dataclass(frozen=True)
class Cell:
    """A chat.

    Attributes:
        kind: DOCUMENT or CHAT.
        tokens: of the chat.
        seconds: of each round, what each side took.
    """

    kind: str
    tokens: int
    seconds: list[dict[str, float]]

    def added(self, scope: str, per_second: float = 1.0) -> Estimate:
        """What a scope takes beyond stock vLLM, in seconds or in parts of them."""
        return estimate([per_second * (of[scope] - of[STOCK]) for of in self.seconds])

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "added": {scope: asdict(self.added(scope)) for scope in SCOPES}}


class FrontEnd:
    """The renderer of a server, which never starts.

    Args:
        model: its folder.
        longest: most tokens of a chat.
        scope: of eviction; None for stock vLLM.
    """

    def __init__(self, model: Path, longest: int, scope: str | None):
        from vllm import EngineArgs
        from vllm.renderers import ChatParams
        from vllm.renderers.registry import renderer_from_config

        eviction = {"kv_eviction": "kvzip", "kv_eviction_config": {"scope": scope}} if scope else {}
        args = EngineArgs(
            model=str(model),
            max_model_len=longest,
            hf_overrides={"max_position_embeddings": longest},
            **eviction,
        )
        self.renderer = renderer_from_config(args.create_engine_config())
        self.params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})

    def render(self, messages: Sequence[Any]) -> Any:
        """The prompt of a chat, with what was found in it."""
        _, (prompt,) = self.renderer.render_chat([list(messages)], self.params)
        return prompt


def text_of(front_end: FrontEnd, tokens: int) -> str:
    """Real text of so many tokens, about."""
    tokenizer = front_end.renderer.get_tokenizer()
    parts: list[str] = []
    count = 0
    for sentence in itertools.cycle(sentences()):
        count += len(tokenizer.encode(f" {sentence}", add_special_tokens=False))
        if count > tokens:
            break
        parts.append(sentence)
    return " ".join(parts)


def messages_of(kind: str, front_end: FrontEnd, tokens: int) -> list[dict[str, str]]:
    """A chat whose last message is a question."""
    question = {"role": "user", "content": "What of this matters most?"}
    if kind == DOCUMENT:
        return [{"role": "system", "content": text_of(front_end, tokens)}, question]
    words = text_of(front_end, TURN)
    turn = [{"role": "user", "content": words}, {"role": "assistant", "content": "I have read it."}]
    return [*turn * (tokens // TURN), question]


def compare(kind: str, sides: dict[str, FrontEnd], tokens: int, rounds: int) -> Cell:
    """All sides in turns.

    Raises:
        RuntimeError: a side with eviction did not find what it looks for.
    """
    messages = messages_of(kind, sides[STOCK], tokens)
    for scope, note in (("prefix", "kv_prefix_len"), ("turns", "kv_turns")):
        if not sides[scope].render(messages).get(note):
            raise RuntimeError(f"scope {scope} found no {note} in a {kind}")
    calls = {
        name: lambda side=side: timed(lambda: side.render(messages), 1)[0] for name, side in sides.items()
    }
    times = in_turns(calls, rounds)
    seen = [{name: times[name][number] for name in sides} for number in range(rounds)]
    return Cell(kind, len(sides[STOCK].render(messages)["prompt_token_ids"]), seen)


def measure(arguments: argparse.Namespace) -> Found:
    """Documents and chats of every length."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    longest = max(arguments.tokens) + 4 * TURN
    sides = {STOCK: FrontEnd(arguments.model, longest, None)}
    sides |= {name: FrontEnd(arguments.model, longest, name) for name in SCOPES}
    sizes = list(itertools.product((DOCUMENT, CHAT), arguments.tokens))
    cells = [compare(kind, sides, tokens, arguments.rounds) for kind, tokens in track(sizes, "chats")]
    columns = ("tokens", STOCK, *(f"{scope} adds [95 %]" for scope in SCOPES))
    shown = table("front end: milliseconds of a chat", ["chat"], columns)
    for cell in cells:
        stock = estimate([of[STOCK] * 1e3 for of in cell.seconds]).median
        added = (str(cell.added(scope, per_second=1e3)) for scope in SCOPES)
        shown.add_row(cell.kind, str(cell.tokens), f"{stock:.3g}", *added)
    results = {"cells": [cell.summary() for cell in cells]}
    return Found(results, [shown])
