"""An OpenAI-compatible endpoint: chats, token counts, and errors that say what to do."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from vllm_kvevict.policy_list import parse

RETRIED = (408, 425, 429, 500, 502, 503, 504)
BODY_WIDTH = 500
PARAMETERS = "kv_params"
"""The field of ``vllm_xargs`` with a policy's parameters, NAME=VALUE[,NAME=VALUE]."""
QUICK_SECONDS = 30.0
"""What a server that runs needs at most to say what it is; answers may take the whole timeout."""


class EndpointError(RuntimeError):
    """The endpoint cannot be used; the message names its URL and what it said."""


class RefusedError(EndpointError):
    """The endpoint refuses a request, and would refuse it again."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """An answer to a chat; see Result."""

    text: str
    prompt_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None
    request: str | None


class Endpoint:
    """An asynchronous context manager that holds the connections.

    Args:
        url: the API's base, with ``/v1``.
        connections: at most, at once.
        timeout: seconds that an answer may take.
        tries: of each request, while the endpoint fails.
        backoff: seconds before the second try; doubled before each further one.
    """

    def __init__(
        self, url: str, connections: int = 8, timeout: float = 600.0, tries: int = 5, backoff: float = 1.0
    ):
        self.url = url.rstrip("/")
        self.root = self.url.removesuffix("/v1")
        self.model = ""
        self._tries, self._backoff, self._timeout = tries, backoff, timeout
        key = os.environ.get("OPENAI_API_KEY", "none")
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=connections),
            headers={"Authorization": f"Bearer {key}"},
        )

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def find_model(self, name: str | None) -> None:
        """Use this model, or the first one that the endpoint lists.

        Raises:
            EndpointError: if it lists none, or not this one.
        """
        listed = await self._call("GET", f"{self.url}/models")
        try:
            names = [str(entry["id"]) for entry in listed["data"]]
        except (KeyError, TypeError):
            raise EndpointError(
                f"{self.url}/models did not answer with a list of models: {str(listed)[:BODY_WIDTH]}"
            ) from None
        if not names or (name is not None and name not in names):
            raise EndpointError(
                f"{self.url} serves {', '.join(names) or 'no model'}{f', not --model {name}' if name else ''}"
            )
        self.model = name or names[0]

    async def version(self) -> str | None:
        """What vLLM says about its version; None if this is not vLLM."""
        try:
            return (await self._call("GET", f"{self.root}/version")).get("version")
        except EndpointError:
            return None

    async def require_eviction(self) -> None:
        """Make sure that the server reads our fields: vLLM without the plugin's flag ignores them.

        Raises:
            EndpointError: if it accepts a policy that does not exist.
        """
        error = await self._refusal({"kv_eviction": "no-such-policy"})
        if error is None:
            raise EndpointError(
                f"{self.url} ignores kv_eviction, so all policies would score like the full cache: start its server "
                "with --kv-eviction full, or measure it as it is with --plain"
            )
        if error.status != HTTPStatus.BAD_REQUEST or "no-such-policy" not in str(error):
            raise error

    async def require_parameters(self, policies: Sequence[str]) -> None:
        """Make sure that requests may set parameters of policies.

        Args:
            policies: that are to be asked for, with their parameters.

        Raises:
            EndpointError: they may not; it says how servers are started instead.
        """
        error = await self._refusal({PARAMETERS: "no_such_parameter=1"})
        if "no_such_parameter" in str(error):
            return
        asked = parse(policies[0])
        flags = " ".join(f"--kv-eviction-config.{name} {text}" for name, text in asked.texts)
        raise EndpointError(
            f"{self.url} takes parameters at its start only, not by request, so it cannot serve "
            f"{', '.join(policies)}: for each of them start a server of its own (vllm serve ... --kv-eviction "
            f"{asked.policy} {flags}), and ask it for {asked.policy}@{asked.field} with the same --output"
        )

    async def require_turns(self, fields: Mapping[str, Any], min_prompt: int) -> None:
        """Make sure that the server finds where the turns of chats end.

        Args:
            fields: of ours, with which it evicts.
            min_prompt: the server's, in tokens.

        Raises:
            EndpointError: it does not, so it would evict chats whole.
        """
        # An answer of one token would leave the prompt whole.
        error = await self._refusal(fields, "what ? " * max(1, min_prompt), tokens=2)
        if error is None:
            raise EndpointError(
                f"{self.url} evicts chats whole: start its server with --kv-eviction-config.scope turns, which "
                "--scopes turns needs"
            )
        if "kv_turns" not in str(error):
            raise error

    async def _refusal(
        self, fields: Mapping[str, Any], prompt: str = "what ?", tokens: int = 1
    ) -> RefusedError | None:
        """What the server says against a text with these fields; None if it answers."""
        try:
            await self.ask({"prompt": prompt}, tokens, fields)
        except RefusedError as error:
            return error
        return None

    async def ask(
        self, prompt: Mapping[str, Any], max_tokens: int, fields: Mapping[str, Any] | None = None
    ) -> Reply:
        """Let a chat or a text go on, with ``vllm_xargs`` if there are fields.

        Args:
            prompt: ``messages`` or ``prompt``, and whatever belongs to it.
            max_tokens: of the reply.
            fields: of ours.
        """
        more = {"vllm_xargs": dict(fields)} if fields else {}
        answer, choice = await self._choice({**prompt, "max_tokens": max_tokens, **more})
        usage = answer.get("usage") or {}
        return Reply(
            text=(choice["message"].get("content") if "messages" in prompt else choice["text"]) or "",
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            finish_reason=choice.get("finish_reason"),
            request=answer.get("id"),
        )

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The only choice of a completion, as the API answers it; greedy, unless the body has a temperature."""
        return (await self._choice(body))[1]

    async def _choice(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The API's answer, and its only choice."""
        is_chat = "messages" in body
        url = f"{self.url}/chat/completions" if is_chat else f"{self.url}/completions"
        answer = await self._call("POST", url, {"model": self.model, "temperature": 0, **body})
        match answer:
            case {"choices": [{"message": dict()} as choice, *_]} if is_chat:
                return answer, choice
            case {"choices": [{"text": _} as choice, *_]} if not is_chat:
                return answer, choice
        raise EndpointError(f"{url} answered with no completion: {str(answer)[:BODY_WIDTH]}")

    async def render(
        self, chat: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """A chat's token ids, and the fields with which :meth:`generate` evicts them as if they were the chat.

        Args:
            chat: the body of a request.
            fields: of ours, with which it is evicted.

        Raises:
            EndpointError: in particular if the server does not render.
        """
        body = {"model": self.model, **chat, "vllm_xargs": dict(fields)}
        if "tools" in chat:
            body["tool_choice"] = "none"  # nothing is answered, so the server needs no parser of calls
        try:
            answer = await self._call("POST", f"{self.url}/chat/completions/render", body)
        except RefusedError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
                raise
            raise EndpointError(
                f"{self.url} does not say where the turns of a chat end: start its server with --enable-scale-out, "
                "which --scopes turns needs here"
            ) from None
        return answer["token_ids"], answer["sampling_params"]["extra_args"] or {}

    async def generate(
        self, tokens: Sequence[int], fields: Mapping[str, Any], **params: Any
    ) -> dict[str, Any]:
        """The answer to what was rendered, greedy.

        Args:
            fields: as of :meth:`render`.
            params: other sampling parameters.
        """
        sampling = {"temperature": 0, **params, "extra_args": dict(fields)}
        body = {"model": self.model, "token_ids": list(tokens), "sampling_params": sampling}
        return await self._call("POST", f"{self.root}/inference/v1/generate", body)

    async def tokenize(self, prompt: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat or a text, as the server would answer it.

        Raises:
            EndpointError: in particular if the server has no ``/tokenize``.
        """
        url = f"{self.root}/tokenize"
        defaults = {"add_generation_prompt": True} if "messages" in prompt else {"add_special_tokens": True}
        try:
            answer = await self._call("POST", url, {"model": self.model, **defaults, **prompt})
            if isinstance(tokens := answer.get("tokens"), list):
                return tokens
            why = "gave no tokens"
        except RefusedError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
                raise
            why = f"answered HTTP {error.status}"
        raise EndpointError(
            f"{url} {why}, which counts tokens: without it use --scopes prompt, and no real text"
        )

    async def _call(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        """One request, repeated while the endpoint fails.

        Raises:
            RefusedError: for a status that repeating does not change.
            EndpointError: after the last try.
        """
        problem = ""
        quick = min(self._timeout, QUICK_SECONDS)
        timeout = httpx.Timeout(self._timeout if method == "POST" else quick, connect=quick)
        for attempt in range(self._tries):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                response = await self._client.request(method, url, json=body, timeout=timeout)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise EndpointError(f"{url} is not a URL: {error}") from None
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if response.status_code in RETRIED:
                problem = f"HTTP {response.status_code}: {_message(response)}"
                continue
            return _content(url, response)
        raise EndpointError(f"{url} failed {self._tries} times, the last time with {problem}")


def _content(url: str, response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object."""
    if response.status_code != HTTPStatus.OK:
        status = response.status_code
        raise RefusedError(f"{url} answered HTTP {status}: {_message(response)}", status)
    try:
        content = response.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise EndpointError(f"{url} did not answer with a JSON object: {response.text[:BODY_WIDTH]}")
    return content


def _message(response: httpx.Response) -> str:
    """What an error's body says; vLLM, OpenAI and FastAPI put it in different places."""
    try:
        content = response.json()
        error = content.get("error", content)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        text = None
    return str(text or response.text or response.reason_phrase)[:BODY_WIDTH]
