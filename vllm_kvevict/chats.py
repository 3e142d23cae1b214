"""Chats in users' files: messages, or whole requests to ``/v1/chat/completions``, alone or as JSON lines."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = {
    "tools": list,
    "documents": list,
    "chat_template": str,
    "chat_template_kwargs": dict,
    "reasoning_effort": str,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
}
"""Fields of a request, besides its messages, that its prompt depends on."""

NAMES = {list: "a list", str: "text", dict: "an object", bool: "true or false"}

TO_TEMPLATE = ("documents", "reasoning_effort")
"""Those of them that ``/tokenize`` knows as arguments of the template only, as which the chat route hands them on."""


@dataclass(frozen=True)
class ChatRequest:
    """What a prompt is made of.

    Attributes:
        messages: each with its role, as of the API.
        settings: further fields of a request that the prompt depends on.
    """

    messages: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> int | None:
        """The index of the last message of the user; None without any."""
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return users[-1] if users else None

    @property
    def asked(self) -> str:
        """The text of that message."""
        content = "" if self.question is None else self.messages[self.question]["content"]
        if isinstance(content, str):
            return content
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))

    @property
    def has_template(self) -> bool:
        """Whether it brings its own template, which servers take only if they trust requests."""
        return "chat_template" in {*self.settings, *self.settings.get("chat_template_kwargs", ())}

    def body(self, question: str | None = None) -> dict[str, Any]:
        """The fields of a request; the user's last message may say something else."""
        messages = [dict(message) for message in self.messages]
        if question is not None and self.question is not None:
            messages[self.question]["content"] = question
        return {"messages": messages, **self.settings}


def read_text(name: str, flag: str) -> str:
    """A file's text as it is: line ends are part of a prompt.

    Args:
        name: of the file; - is standard input.
        flag: that names it, for errors.

    Raises:
        ValueError: one sentence.
    """
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode()
    except OSError as error:
        raise ValueError(f"{flag} {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {name} is not text in UTF-8") from None
    if not text:
        raise ValueError(f"{flag} {name} is empty")
    return text


def read_entries(name: str, flag: str) -> list[tuple[str, Any]]:
    """What a file of JSON holds, or each of its lines, with the place that errors name.

    Raises:
        ValueError: as :func:`read_text`.
    """
    text, place = read_text(name, flag), f"{flag} {name}"
    if text.isspace():
        raise ValueError(f"{place} is empty")
    try:
        return [(place, json.loads(text))]
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise ValueError(f"{place} is not JSON ({error})") from None
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entries.append((f"{place} line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} line {number} is not JSON ({error})") from None
    return entries


def read_chat(name: str, flag: str) -> ChatRequest:
    """The chat of a file.

    Raises:
        ValueError: as :func:`read_text`.
    """
    (place, entry), *others = read_entries(name, flag)
    if others:
        raise ValueError(f"{flag} {name} has {1 + len(others)} chats: give a file with one of them")
    return parse_chat(entry, place)


def parse_chat(entry: Any, place: str) -> ChatRequest:
    """A chat from what JSON says.

    Args:
        entry: a list of messages, or a request that has one.
        place: that errors name.

    Raises:
        ValueError: one sentence that names the message or field.
    """
    body = entry if isinstance(entry, dict) else {"messages": entry}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place} must be a list of messages, each with role and content, or a chat request that has one"
        )
    for number, message in enumerate(messages, 1):
        if problem := _problem(message):
            raise ValueError(f"{place}, message {number}: {problem}")
    return ChatRequest(messages, _settings(body, place))


def _problem(message: Any) -> str | None:
    """What is wrong with a message."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return "it must be an object with a role"
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return "tool_calls must be a list of objects, each with a function and its name"
    # An assistant may have called tools, thought or refused instead.
    if not isinstance(content, str | list) and (content is not None or role != "assistant"):
        return f"content must be text or a list of parts, not {json.dumps(content)[:40]}"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _settings(body: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields of a request that count, in the form that all routes of a server know."""
    given = {name: body[name] for name in KINDS if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, KINDS[name]):
            raise ValueError(f"{place}: {name} must be {NAMES[KINDS[name]]}")
    own = given.get("chat_template_kwargs", {})
    more = {name: given.pop(name) for name in TO_TEMPLATE if name in given}
    if "reasoning_effort" in more and "enable_thinking" not in own:  # as vLLM's chat route does
        more["enable_thinking"] = more["reasoning_effort"] != "none"
    return given | ({"chat_template_kwargs": own | more} if more else {})
