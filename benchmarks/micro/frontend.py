"""What the front end adds to a chat.

In the scopes ``prefix`` and ``turns`` a server finds out where the question, or each turn, of a chat begins. Before
that vLLM renders the chat and makes tokens of it, which takes far longer. Here renderers of stock vLLM and of servers
with eviction do that in turns, in one process without an engine, with real text and the tokenizer of a real model:
a document with a question, and a chat of many turns.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.harness.measure import Estimate, estimate, timed
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import STOCK
from benchmarks.harness.tables import table
from benchmarks.micro.loop import Found, in_turns
from vllm_kvevict.engine.request_options import facts_of
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.texts import sentences

SCOPES = ("prefix", "turns")
DOCUMENT, CHAT = "document", "chat"
TURN = 512
"""Tokens of a turn of a chat, about."""
Rounds = dict[str, list[float]]
"""Seconds of each round, by side."""
HAS_DTYPE = False
OPTIONS = (
    ("rounds", whole, 15, "runs of each side"),
    ("tokens", whole, [1024, 8192, 32768], "of each chat, about"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """Whether the real model is missing."""
    return None if checkpoint.find() else checkpoint.missing()


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


def compare(kind: str, sides: dict[str, FrontEnd], tokens: int, rounds: int) -> tuple[int, Rounds]:
    """All sides in turns.

    Returns:
        Tokens of the chat, and the seconds of each side.

    Raises:
        RuntimeError: a side with eviction did not find what it looks for.
    """
    messages = messages_of(kind, sides[STOCK], tokens)
    for scope in SCOPES:
        if not facts_of(sides[scope].render(messages)).ends:
            raise RuntimeError(f"scope {scope} found no end in a {kind}")
    calls = {
        name: lambda side=side: timed(lambda: side.render(messages), 1)[0] for name, side in sides.items()
    }
    found = in_turns(calls, rounds)
    return len(sides[STOCK].render(messages)["prompt_token_ids"]), found


def added_ms(seconds: Rounds, scope: str) -> Estimate:
    """What a scope takes beyond stock vLLM."""
    both = zip(seconds[scope], seconds[STOCK], strict=True)
    return estimate([1e3 * (ours - theirs) for ours, theirs in both])


def measure(arguments: argparse.Namespace) -> Found:
    """Documents and chats of every length."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    longest = max(arguments.tokens) + 4 * TURN
    sides = {STOCK: FrontEnd(checkpoint.folder(), longest, None)}
    sides |= {name: FrontEnd(checkpoint.folder(), longest, name) for name in SCOPES}
    columns = ("tokens", STOCK, *(f"{scope} adds [95 %]" for scope in SCOPES))
    shown, cells = table("front end: milliseconds of a chat", ["chat"], columns), []
    for kind, asked in track([*itertools.product((DOCUMENT, CHAT), arguments.tokens)], "chats"):
        tokens, seconds = compare(kind, sides, asked, arguments.rounds)
        added = {scope: added_ms(seconds, scope) for scope in SCOPES}
        stock = estimate([1e3 * one for one in seconds[STOCK]]).median
        shown.add_row(kind, str(tokens), f"{stock:.3g}", *map(str, added.values()))
        figures = {scope: asdict(one) for scope, one in added.items()}
        cells.append({"kind": kind, "tokens": tokens, "seconds": seconds, "added_ms": figures})
    return Found({"cells": cells}, [shown])
