"""What the front end adds to a chat: ``python -m benchmarks.frontend``.

In the scopes ``prefix`` and ``turns`` a server finds out where the question, or each turn, of a chat begins. Before
that vLLM renders the chat and makes tokens of it, which takes far longer. Here renderers of stock vLLM and of servers
with eviction do that in turns, in one process without an engine, with real text and the tokenizer of a real model:
a document with a question, and a chat of many turns.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.measure import Estimate, estimate, record, save, timed, warn_if_busy
from benchmarks.harness.options import add_counts, whole
from benchmarks.harness.scenarios import STOCK, Target, show_targets
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.texts import sentences

SCOPES = ("prefix", "turns")
DOCUMENT, CHAT = "document", "chat"
TURN = 512
"""Tokens of a turn of a chat, about."""
TARGET_TOKENS, MOST_SECONDS = 32768, 0.020
"""Of a document, and what scope ``prefix`` may add to it."""


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


def seconds_of(front_end: FrontEnd, messages: Sequence[Any]) -> float:
    """What rendering a chat takes."""
    wall, _ = timed(lambda: front_end.render(messages), 1)
    return wall


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
    """All sides in turns; the first, uncounted round warms up.

    Raises:
        RuntimeError: a side with eviction did not find what it looks for.
    """
    messages = messages_of(kind, sides[STOCK], tokens)
    for scope, note in (("prefix", "kv_prefix_len"), ("turns", "kv_turns")):
        if not sides[scope].render(messages).get(note):
            raise RuntimeError(f"scope {scope} found no {note} in a {kind}")
    seen = [{name: seconds_of(side, messages) for name, side in sides.items()} for _ in range(rounds + 1)]
    return Cell(kind, len(sides[STOCK].render(messages)["prompt_token_ids"]), seen[1:])


def targets(cells: Sequence[Cell], model: Path) -> list[Target]:
    """What a long document may take longer, with the tokenizer of the usual model."""
    if model != checkpoint.find():
        return []
    name = f"seconds that scope prefix adds to a document of {TARGET_TOKENS} tokens"
    usual = [one for one in cells if one.kind == DOCUMENT and abs(one.tokens - TARGET_TOKENS) < TURN]
    return [Target(name, one.added("prefix"), MOST_SECONDS, at_most=True) for one in usual]


def show(cells: Sequence[Cell]) -> Table:
    """The results as a table."""
    table = Table(title="front end: milliseconds of a chat")
    for column in ("chat", "tokens", STOCK, *(f"{scope} adds [95 %]" for scope in SCOPES)):
        table.add_column(column, justify="left" if column == "chat" else "right")
    for cell in cells:
        stock = estimate([of[STOCK] * 1e3 for of in cell.seconds]).median
        added = (str(cell.added(scope, per_second=1e3)) for scope in SCOPES)
        table.add_row(cell.kind, str(cell.tokens), f"{stock:.3g}", *added)
    return table


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_counts(parser, ("rounds", 15, "runs of each side"))
    parser.add_argument(
        "--tokens",
        type=whole,
        nargs="+",
        default=[1024, 8192, TARGET_TOKENS],
        metavar="N",
        help="of each chat, about (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help=f"folder of another model with a chat template (default: {checkpoint.NAME})",
    )
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or checkpoint.find()
    if arguments.model is None:
        parser.error(checkpoint.missing())
    return arguments


def main() -> int:
    """Measure; the exit code."""
    from vllm.plugins import load_general_plugins

    arguments = parse_arguments()
    load_general_plugins()
    console = Console(width=110)
    load = warn_if_busy(console)
    longest = max(arguments.tokens) + 4 * TURN
    sides = {name: FrontEnd(arguments.model, longest, name) for name in SCOPES}
    sides = {STOCK: FrontEnd(arguments.model, longest, None), **sides}
    sizes = list(itertools.product((DOCUMENT, CHAT), arguments.tokens))
    cells = [compare(kind, sides, tokens, arguments.rounds) for kind, tokens in track(sizes, "chats")]
    console.print(show(cells))
    content = {
        "settings": {**vars(arguments), "model": arguments.model.name},
        "load_average_at_start": load,
        "cells": [cell.summary() for cell in cells],
        "targets": show_targets(console, targets(cells, arguments.model)),
    }
    console.print(f"written to {save('frontend', record('frontend', content))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
