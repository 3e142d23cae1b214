"""Where messages begin in a rendered chat: it is rendered once more with a mark of its own in each of them.

A mark is a character without a meaning that neither the chat nor its prompt contains. It stands behind the whitespace
with which a message begins, since many templates trim.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.engine.frontend.chat import Chat, unused_marks


@dataclass(frozen=True)
class Marked:
    """A chat that was rendered with marks.

    Attributes:
        text: without the marks.
        places: where in the text the messages begin, by their indices; only those whose mark is there exactly once.
    """

    text: str
    places: dict[int, int]


def render_marked(chat: Chat, text: str, indices: Iterable[int]) -> Marked:
    """Render a chat with marks in some of its messages, twice at most.

    Args:
        text: the chat as it was rendered without.

    Raises:
        ValueError, VLLMClientError: a template may refuse anything.
    """
    begins = {index: _begin_of_text(chat.messages[index]) for index in indices}
    with_text = [index for index, begin in begins.items() if begin is not None]
    marks = dict(zip(with_text, _unused_marks(chat.messages, text), strict=False))
    marked = _render(chat, marks)
    if marked.text == text or len(marked.places) == len(marks):
        return marked
    # What an escape has made of a mark stays in the text, so it is rendered with those that are shown as they are.
    return _render(chat, {index: mark for index, mark in marks.items() if index in marked.places})


def _unused_marks(messages: Sequence[Any], text: str) -> Iterator[str]:
    written = json.dumps(messages, ensure_ascii=False, default=str)
    return unused_marks(text, written)


def _render(chat: Chat, marks: Mapping[int, str]) -> Marked:
    messages = [
        _with_mark(message, marks[index]) if index in marks else message
        for index, message in enumerate(chat.messages)
    ]
    return _without_marks(chat.rendered(messages)["prompt"], marks)


def _without_marks(text: str, marks: Mapping[int, str]) -> Marked:
    """Take the marks out of a text and note where they stood."""
    owners = {mark: index for index, mark in marks.items()}
    found: dict[int, list[int]] = {index: [] for index in marks}
    if not marks:
        return Marked(text, {})
    pattern = re.compile(f"[{''.join(owners)}]")
    for before, mark in enumerate(pattern.finditer(text)):
        found[owners[mark[0]]].append(mark.start() - before)
    places = {index: once[0] for index, once in found.items() if len(once) == 1}
    return Marked(pattern.sub("", text), places)


def _begin_of_text(message: Any) -> tuple[int | None, int] | None:
    """The part of a message that has its first text, None if it is not in parts, and how much whitespace begins that.

    Returns:
        None if the message has no text.
    """
    content = message.get("content")
    texts = enumerate(map(_text_of, content)) if isinstance(content, list) else [(None, _text_of(content))]
    return next(((part, len(text) - len(text.lstrip())) for part, text in texts if text.strip()), None)


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _with_mark(message: Any, mark: str) -> Any:
    """A message that has text, with a mark before the first of it."""
    begin = _begin_of_text(message)
    assert begin is not None
    index, blanks = begin
    content = message["content"]
    if index is None:
        return {**message, "content": content[:blanks] + mark + content[blanks:]}
    part, text = content[index], _text_of(content[index])
    marked = text[:blanks] + mark + text[blanks:]
    part = {**part, "text": marked} if isinstance(part, dict) else marked
    return {**message, "content": [*content[:index], part, *content[index + 1 :]]}
