"""Where the question of a chat begins, for servers that compress what comes before it without seeing it.

The last user message is the question. Where it begins is found by rendering the chat once more with another question:
what both have in common comes before it, whatever the template makes of roles, tools and earlier turns.
Every chat endpoint and ``LLM.chat`` render through vLLM's ``BaseRenderer``, which has messages, template and token ids.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.renderers.base import BaseRenderer

from vllm_kvevict.engine.config import options_of

PREFIX_LEN = "kv_prefix_len"
"""The entry of a rendered prompt that holds the number of tokens before the question."""

MEANINGLESS = [chr(code) for code in range(0xE000, 0xE100)]
"""Characters that Unicode gives no meaning; one that the chat does not contain stands in for the question."""

WORD = "q"
"""Stands in for the question where it matters that words join tokens before them."""


@functools.cache
def install() -> None:
    """Note in the chats of this process where their question begins, if their engine evicts prefixes."""
    render_chat, render_chat_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render_chat)
    def noted(
        self: BaseRenderer, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        rendered, prompts = render_chat(self, conversations, chat_params, tok_params, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            if _is_worth_it(self, prompt):
                note_prefix(self, messages, prompt, chat_params, tok_params)
        return rendered, prompts

    @functools.wraps(render_chat_async)
    async def noted_async(
        self: BaseRenderer, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        rendered, prompts = await render_chat_async(self, conversations, chat_params, tok_params, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            if _is_worth_it(self, prompt):
                # vLLM's own threads for templates and tokenisation, for each of which it keeps a tokenizer.
                work = functools.partial(note_prefix, self, messages, prompt, chat_params, tok_params)
                await asyncio.get_running_loop().run_in_executor(self._executor, work)
        return rendered, prompts

    BaseRenderer.render_chat = noted  # type: ignore[method-assign]
    BaseRenderer.render_chat_async = noted_async  # type: ignore[method-assign]


def note_prefix(
    renderer: BaseRenderer, messages: Sequence[Any], prompt: Any, chat_params: Any, tok_params: Any = None
) -> None:
    """Write into a rendered chat how many of its tokens come before the question, unless that cannot be told.

    Args:
        renderer: what rendered it.
        messages: the chat, as it was rendered.
        prompt: the result, with ``prompt_token_ids``.
        chat_params: template and its arguments.
        tok_params: how the text was tokenised, None for the renderer's default.
    """
    tok_params = tok_params or renderer.default_chat_tok_params
    if _may_be_cut(tok_params, len(prompt["prompt_token_ids"])):
        return
    prefix_len = find_prefix(renderer, messages, prompt, chat_params, tok_params)
    if prefix_len is not None:
        prompt[PREFIX_LEN] = prefix_len


def find_prefix(
    renderer: BaseRenderer, messages: Sequence[Any], prompt: Any, chat_params: Any, tok_params: Any
) -> int | None:
    """Count the tokens of a rendered chat that come before its last user message.

    The count may be a few tokens short, but it never includes a token of the question. Where the prompt is rendered as
    text it does not depend on the question either.

    Args:
        renderer, messages, prompt, chat_params, tok_params: as in :func:`note_prefix`.

    Returns:
        The number of tokens: 0 without a user message, None when the question leaves no trace in the prompt.
    """
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return 0

    def asking(question: str) -> Any:
        changed = list(messages)
        changed[users[-1]] = {**messages[users[-1]], "content": question}
        return renderer.render_messages(changed, chat_params)[1]

    ids, text = prompt["prompt_token_ids"], prompt.get("prompt", "")
    try:
        other = asking(next((mark for mark in MEANINGLESS if mark not in text), MEANINGLESS[0]))
        if "prompt_token_ids" in other:  # Mistral's tokenizers give no text
            return _prefix_of_ids(ids, other, asking(WORD))
    except (ValueError, VLLMClientError):  # a template may refuse anything
        return None
    other_text = other["prompt"]
    if text == other_text:
        return None
    # Whitespace and the last token could merge with the question's first characters.
    before = text[: common_length(text, other_text)].rstrip()
    before_ids = renderer.tokenize_prompt({"prompt": before}, tok_params)["prompt_token_ids"]
    return common_length(before_ids[:-1], ids)


def _prefix_of_ids(ids: Sequence[int], first: Any, second: Any) -> int | None:
    """The same for prompts without text: what the chat has in common with two others, less one token.

    One begins like a word and one does not, so that a token that joins the end of the question's header to its first
    letters is left out for every question. Both could begin with the token for unknown text, hence one token less.
    """
    first_ids, second_ids = first["prompt_token_ids"], second["prompt_token_ids"]
    if ids == first_ids:
        return None
    return max(min(common_length(ids, first_ids), common_length(first_ids, second_ids)) - 1, 0)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common prefix; by bisection, as comparing slices is fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_worth_it(renderer: BaseRenderer, prompt: Any) -> bool:
    """Whether the engine evicts prefixes, and the prompt has enough tokens to have such a prefix."""
    options = options_of(renderer.config)
    if options is None or options.scope != "prefix":
        return False
    ids = prompt.get("prompt_token_ids")
    return ids is not None and len(ids) >= options.min_prompt


def _may_be_cut(tok_params: Any, length: int) -> bool:
    """Whether the prompt may lack tokens at one of its ends, after which nothing could be compared."""
    limit = tok_params.truncate_prompt_tokens
    if limit is not None and limit < 0:
        limit = tok_params.max_truncation_tokens
    return limit is not None and length >= limit
