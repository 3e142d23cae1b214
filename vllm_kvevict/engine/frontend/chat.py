"""Where the question of a chat begins, for servers that compress what comes before it without seeing it.

The last user message is the question. Where it begins is found by rendering the chat once more with another question:
what both have in common comes before it, whatever the template makes of roles, tools and earlier turns.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger
from vllm.renderers.base import BaseRenderer

from vllm_kvevict.engine.frontend import media
from vllm_kvevict.engine.frontend.counting import common_length, tokens_before
from vllm_kvevict.engine.request_options import ChatFacts

logger = init_logger("vllm.kv_eviction")

MEANINGLESS = tuple(map(chr, range(0xE000, 0xF900)))
"""Characters that Unicode gives no meaning; one that the chat does not contain stands in for the question."""

_MEANINGLESS = re.compile(f"[{MEANINGLESS[0]}-{MEANINGLESS[-1]}]")

MARK = MEANINGLESS[0]

WORD = "q"
"""Stands in for the question where it matters that words join tokens before them."""

NUMBER = "7"
"""Shares no first character with :data:`WORD`."""

ANSWERING = {"add_generation_prompt": True, "continue_final_message": False}
"""Arguments of a template that end a prompt where the assistant begins to answer."""

REFUSALS = (ValueError, VLLMClientError)
"""What renderers raise when a template refuses a chat; it may refuse anything."""

IS_CUT = "the chat may have been cut (truncate_prompt_tokens)"
NO_TRACE = "the chat template does not show the last user message"


class QuestionNotFoundError(ValueError):
    """Where a chat's question begins cannot be told; the message says why."""


@dataclass(frozen=True)
class Chat:
    """What a prompt was rendered from.

    Attributes:
        renderer: what rendered it.
        messages: the chat, with the names of media only.
        params: template and its arguments.
        tok_params: how the text was tokenised; None if nothing was cut.
    """

    renderer: BaseRenderer
    messages: Sequence[Any]
    params: Any
    tok_params: Any

    @property
    def question(self) -> int | None:
        """Where in ``messages`` the last user message is, None when there is none."""
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return users[-1] if users else None

    def rendered(self, messages: Sequence[Any], settings: Mapping[str, Any] | None = None) -> Any:
        """The prompt of other messages in the words of this chat, with further arguments of its template.

        Raises:
            ValueError, VLLMClientError: a template may refuse anything.
        """
        params = self.params
        if settings:
            params = dataclasses.replace(
                params, chat_template_kwargs={**params.chat_template_kwargs, **settings}
            )
        return self.renderer.render_messages(messages, params)[1]

    def again(self) -> Any:
        """The prompt of the same chat, rendered once more."""
        return self.rendered(self.messages)

    def asking(self, question: str | list[Any]) -> Any:
        """The prompt of the same chat with another question.

        Raises:
            ValueError, VLLMClientError: a template may refuse anything.
        """
        begin = self.up_to(question)
        return self.rendered([*begin, *self.messages[len(begin) :]])

    def asking_after(self, words: str) -> Any:
        """The prompt of the same chat with words before its question.

        Raises:
            ValueError, VLLMClientError: as :meth:`asking`.
        """
        assert self.question is not None
        own = self.messages[self.question].get("content") or ""
        return self.asking(words + own if isinstance(own, str) else [{"type": "text", "text": words}, *own])

    def up_to(self, question: str | list[Any]) -> list[Any]:
        """The messages before the last user message, and that one with another question."""
        last = self.question
        assert last is not None
        return [*self.messages[:last], {**self.messages[last], "content": question}]

    def going_on(self, reply: str, question: str) -> list[Any]:
        """The whole chat with the assistant's reply, in place of one that was begun, and a further question."""
        begun = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        before = self.messages[:-1] if begun else self.messages
        return [*before, {"role": "assistant", "content": reply}, {"role": "user", "content": question}]


def find_prefix(facts: ChatFacts, prompt: Any) -> int:
    """Count the tokens of a rendered chat that come before its last user message.

    The count may be a few tokens short, but it never includes a token of the question. Where the prompt is rendered as
    text it does not depend on the question either.

    Args:
        facts: what was rendered; gets a note if its template writes something else each time.
        prompt: the result, with ``prompt_token_ids``.

    Returns:
        The number of tokens, 0 without a user message.

    Raises:
        QuestionNotFoundError: the chat was cut, or its template refuses other questions or does not show them.
    """
    chat, ids, text = facts.chat, prompt["prompt_token_ids"], prompt.get("prompt", "")
    if may_be_cut(chat.tok_params, len(ids)):
        raise QuestionNotFoundError(IS_CUT)
    if chat.question is None:
        return 0
    try:
        others = other_prompts(chat, text)
    except REFUSALS as error:
        raise QuestionNotFoundError(f"the chat template refuses another question ({error})") from None
    # Mistral's tokenizers give no text; there a prefix ends at the first image.
    if "prompt_token_ids" in others[0]:
        return prefix_of_ids(ids, *others)
    before = text_before(text, *others)
    # Where one other question is enough, the prompts part at it, so all before it is the same.
    if len(others) > 1:
        note_changes(facts, prompt)
    images = media.placeholders(prompt)[: media.count_media(chat.messages[: chat.question])]
    counts = None if images else tokens_before(chat.renderer, chat.tok_params, text, ids, [len(before)])
    if counts is not None:
        return counts[0]
    before_ids = chat.renderer.tokenize_prompt({"prompt": before}, chat.tok_params)["prompt_token_ids"]
    if images:
        return media.tokens_before(before_ids[:-1], ids, images)
    return common_length(before_ids[:-1], ids)


def note_changes(facts: ChatFacts, prompt: Any) -> None:
    """Note of a chat, and in the log, that its template writes something else each time, if it does."""
    if facts.chat.again()["prompt"] != prompt["prompt"]:
        facts.changes = True
        _log_changes(facts.chat.params.chat_template)


@functools.lru_cache(maxsize=256)
def _log_changes(template: str | None) -> None:
    """Say once of a template that prefixes end at its clock, or whatever it is."""
    logger.warning(
        "KV eviction: %s writes something else each time a chat is rendered (the time, or a random number), so a "
        "prefix ends there, and chats with fewer than min_prompt tokens before it are kept whole: let it write the "
        "date only, or write such things behind the question",
        name_of(template),
    )


def name_of(template: str | None) -> str:
    """What a chat template is called in the log."""
    return "the model's chat template" if template is None else f"the chat template {template[:60]!r}..."


def other_prompts(chat: Chat, text: str) -> list[Any]:
    """The same chat with one other question, or with two where the first does not tell where the question begins.

    It tells if the prompts part at a mark that the chat does not contain. A template may escape it, though, and then
    its escape may begin like the question's. No question begins like both a mark, or a number, and a word.

    Args:
        chat: what was rendered.
        text: the result, if it is text.

    Raises:
        ValueError, VLLMClientError: as :meth:`Chat.asking`.
    """
    mark = unused_mark(text)
    asking: Callable[[str], Any] = chat.asking
    try:
        first = asking(mark or NUMBER)
    except REFUSALS:  # so short a question
        asking = chat.asking_after
        first = asking(mark or NUMBER)
    if mark and "prompt" in first and first["prompt"].startswith(mark, common_length(text, first["prompt"])):
        return [first]
    return [first, asking(WORD)]


def text_before(text: str, *others: Any) -> str:
    """What a chat has in common with others before their questions.

    Raises:
        QuestionNotFoundError: the question leaves no trace.
    """
    first, last = others[0]["prompt"], others[-1]["prompt"]
    if text == first == last:
        raise QuestionNotFoundError(NO_TRACE)
    # Whitespace and the last token could merge with the question's first characters.
    return text[: min(common_length(text, first), common_length(first, last))].rstrip()


def unused_mark(text: str) -> str | None:
    """A character without a meaning that a text does not contain, None when it contains all of them."""
    return next(unused_marks(text), None)


def unused_marks(*texts: str) -> Iterator[str]:
    """The characters without a meaning that no text contains, in their order."""
    used = set(itertools.chain.from_iterable(map(_MEANINGLESS.findall, texts)))
    return (mark for mark in MEANINGLESS if mark not in used)


def prefix_of_ids(ids: Sequence[int], first: Any, second: Any) -> int:
    """The same for prompts without text: what the chat has in common with two others, less one token.

    One begins like a word and one does not, so that a token that joins the end of the question's header to its first
    letters is left out for every question. Both could begin with the token for unknown text, hence one token less.

    Raises:
        QuestionNotFoundError: as :func:`text_before`.
    """
    first_ids, second_ids = first["prompt_token_ids"], second["prompt_token_ids"]
    if ids == first_ids == second_ids:
        raise QuestionNotFoundError(NO_TRACE)
    return max(min(common_length(ids, first_ids), common_length(first_ids, second_ids)) - 1, 0)


def may_be_cut(tok_params: Any, length: int) -> bool:
    """Whether the prompt may lack tokens at one of its ends, after which nothing could be compared."""
    if tok_params is None:
        return False
    limit = tok_params.truncate_prompt_tokens
    if limit is not None and limit < 0:
        limit = tok_params.max_truncation_tokens
    return limit is not None and length >= limit
