"""The user's own prompts: a file of JSON lines, each a text, a chat, or a document and a question about it."""

import json
from pathlib import Path
from typing import Any

from vllm_kvevict.quality.cases import Case

TASK = "prompts"
SHAPES = '{"prompt": TEXT}, {"messages": CHAT} or {"document": TEXT, "question": TEXT}'
ROLES = ("system", "developer", "user", "assistant")


class PromptsError(ValueError):
    """A file of prompts cannot be read; the message names the line."""


def read_prompts(path: Path) -> list[Case]:
    """The prompts of a file.

    What comes before the last message of a chat, or is the document, can be evicted without the question in view.

    Raises:
        PromptsError: a line is none of the three.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"--prompts {path} cannot be read: {error}") from None
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                cases.append(_case(json.loads(line), len(cases)))
            except (ValueError, TypeError, KeyError) as error:
                raise PromptsError(f"--prompts {path}, line {number} is not {SHAPES}: {error}") from None
    if not cases:
        raise PromptsError(f"--prompts {path} has no prompts")
    return cases


def _case(entry: Any, index: int) -> Case:
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    match sorted(entry):
        case ["prompt"]:
            return _made(index, context="", question=_text(entry["prompt"]), form="completion")
        case ["messages"]:
            turns = tuple(
                (_role(message["role"]), _text(message["content"])) for message in entry["messages"]
            )
            if not turns or turns[-1][0] != "user":
                raise ValueError("the last message must be the user's")
            return _made(index, context="", question=turns[-1][1], form="message", turns=turns[:-1])
        case ["document", "question"]:
            document, question = _text(entry["document"]), _text(entry["question"])
            return _made(index, context=f"{document}\n\n", question=question, form="message")
    raise ValueError(f"its fields are {', '.join(sorted(entry)) or 'none'}")


def _made(index: int, **parts: Any) -> Case:
    nothing: dict[str, Any] = {"length": None, "depth": None, "expected": (), "max_tokens": 0}
    return Case(task=TASK, index=index, score=lambda reply: 0.0, **nothing, **parts)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value


def _role(value: Any) -> str:
    if value not in ROLES:
        raise ValueError(f"the role {value!r} is none of {', '.join(ROLES)}")
    return str(value)
