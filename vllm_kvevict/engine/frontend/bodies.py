"""Bodies of HTTP requests, read before vLLM does: it drops fields that it does not know, and makes numbers of true and
false."""

import json
import re
from typing import Any

from fastapi import HTTPException

from vllm_kvevict.engine.request_options import REQUEST_FIELDS

MARK = re.compile(rb'"(?:k|\\u006[bB])(?:v|\\u0076)(?:_|\\u005[fF])')
"""How our fields begin in JSON of UTF-8, escaped or not; other bodies of it, however long, are not parsed here."""


class BodyCheck:
    """ASGI middleware of a server that evicts: answers with HTTP 400 what would be ignored or misread.

    It looks at the body when the endpoint has received it, so after other middleware, such as that of ``--api-key``.
    """

    PATH = f"{__name__}.BodyCheck"
    """What ``--middleware`` calls it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []

        async def checked() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    check_body(b"".join(parts))
                    parts.clear()
            return message

        await self.app(scope, checked, send)


def check_body(body: bytes) -> None:
    """Refuse fields of ours that stand in the wrong place, or are true or false.

    Raises:
        HTTPException: 400, with a sentence that names the field.
    """
    # As vLLM's server reads it: UTF-16 and UTF-32, too.
    if json.detect_encoding(body).startswith("utf-8") and not MARK.search(body):
        return
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return  # vLLM has an answer for that
    sentence = fault_of(request) if isinstance(request, dict) else None
    if sentence is not None:
        raise HTTPException(400, sentence)


def fault_of(request: dict[str, Any]) -> str | None:
    """What is wrong with our fields in a request, in one sentence; None if vLLM takes them as meant."""
    place = "sampling_params.extra_args" if "sampling_params" in request else "vllm_xargs"
    fields = request.get("vllm_xargs")
    for name in REQUEST_FIELDS:
        if name in request:
            example = f', with the OpenAI client extra_body={{"vllm_xargs": {{"{name}": ...}}}}'
            there = f"put it there{example if place == 'vllm_xargs' else ''}"
            return f"{name} is a field of {place}, not of the request itself: {there}"
        given = fields.get(name) if isinstance(fields, dict) else None
        if any(isinstance(value, bool) for value in (given if isinstance(given, list) else [given])):
            return f"{name} must not be true or false, got {json.dumps(given)}"
    return None
