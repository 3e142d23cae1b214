"""What is noted in the chats of a server that evicts: what they were rendered from, and where they are evicted.

Every chat endpoint and ``LLM.chat`` render through vLLM's ``BaseRenderer``, which has messages, template and token ids.
Only the chats of gpt-oss models have a renderer of their own (``harmony.py``).
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.renderers.base import BaseRenderer

from vllm_kvevict.engine import hooks
from vllm_kvevict.engine.config import options_of, require_options
from vllm_kvevict.engine.frontend import media
from vllm_kvevict.engine.frontend.boundaries import find_turns
from vllm_kvevict.engine.frontend.chat import Chat, QuestionNotFoundError, find_prefix
from vllm_kvevict.engine.request_options import CHAT, ChatFacts

WATCHED: ContextVar[list[Any] | None] = ContextVar("watched", default=None)
"""Gets the rendered prompts of a task that sets it, for routes that answer with tokens only, without what is noted."""


@functools.cache
def install() -> None:
    """Note in the chats of this process where they are evicted, if their engine's scope is not the whole prompt."""
    hooks.wrap("vllm.renderers.base:BaseRenderer.render_chat", _noting)
    hooks.wrap("vllm.renderers.base:BaseRenderer.render_chat_async", _noting_async)


def _noting(render_chat: Callable[..., Any]) -> Callable[..., Any]:
    def noted(
        self: BaseRenderer, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        rendered, prompts = render_chat(self, conversations, chat_params, tok_params, **kwargs)
        for prompt in _noted_chats(self, conversations, prompts, chat_params, tok_params):
            note_ends(prompt)
        return rendered, prompts

    return noted


def _noting_async(render_chat_async: Callable[..., Any]) -> Callable[..., Any]:
    async def noted_async(
        self: BaseRenderer, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        rendered, prompts = await render_chat_async(self, conversations, chat_params, tok_params, **kwargs)
        for prompt in _noted_chats(self, conversations, prompts, chat_params, tok_params):
            # vLLM's own threads for templates and tokenisation, for each of which it keeps a tokenizer.
            await asyncio.get_running_loop().run_in_executor(self._executor, note_ends, prompt)
        return rendered, prompts

    return noted_async


def _noted_chats(
    renderer: BaseRenderer, conversations: Sequence[Any], prompts: Sequence[Any], params: Any, tok_params: Any
) -> list[Any]:
    """Note in the prompts that may be evicted what they were rendered from; those in which more is to be found."""
    tok_params = tok_params or renderer.default_chat_tok_params
    more = []
    for messages, prompt in zip(conversations, prompts, strict=True):
        if note_chat(Chat(renderer, media.without_media(messages), params, tok_params), prompt):
            more.append(prompt)
    return more


def note_chat(chat: Chat, prompt: Any) -> bool:
    """Note in a prompt that may be evicted what it was rendered from; whether it is to be found where it is evicted."""
    options, ids = options_of(chat.renderer.config), prompt.get("prompt_token_ids")
    if options is None or ids is None or len(ids) < options.min_prompt:
        return False
    prompt[CHAT] = ChatFacts(chat)
    if (watched := WATCHED.get()) is not None:
        watched.append(prompt)
    return options.scope != "prompt"


def note_ends(prompt: Any) -> None:
    """Note of a rendered chat where it is evicted in the scope of its server, or why that cannot be told.

    Args:
        prompt: as :func:`note_chat` has left it, with ``prompt_token_ids``.
    """
    facts: ChatFacts = prompt[CHAT]
    in_turns = require_options(facts.chat.renderer.config).scope == "turns"
    try:
        ends = find_turns(facts, prompt) if in_turns else [find_prefix(facts, prompt)]
        facts.ends = [end for end in ends if end]
    except QuestionNotFoundError as error:
        facts.missing = str(error)
