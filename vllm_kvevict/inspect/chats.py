"""A chat as a user has it in a file: its messages, or all of a request to ``/v1/chat/completions``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chat:
    """What a chat template is given.

    Attributes:
        messages: each with its role, as of the API.
        tools: None without any.
        template_arguments: further arguments of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def parse_chat(text: str) -> Chat:
    """Read a chat from JSON.

    Raises:
        ValueError: the end of a sentence that begins with where the text is from.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    body = given if isinstance(given, dict) else {"messages": given}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(
            "must be a list of messages, each with role and content, or the body of a chat request that has one"
        )
    return Chat(messages, body.get("tools") or None, body.get("chat_template_kwargs") or {})


def _is_message(value: Any) -> bool:
    """Whether it has a role, and its content, if any, is text or a list of parts."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | None)
