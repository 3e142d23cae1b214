"""What a model is asked when it repeats a prefix, in the words of the prompt's chat template.

Put together where templates and tokenizer are, for requests whose policy reads a prefix again (``kvzip``). A chat is
rendered once more with the request to repeat in place of its question; what stands behind the prefix then is what the
model reads before it repeats. A chat that is evicted with its question goes on instead: the request is the user's next
turn. Where there is no chat, or that cannot be told, the request is plain text.
The wording is that of the authors (``snu-mllab/KVzip``, ``model/wrapper.py``, ``self_task``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.renderers.base import BaseRenderer
from vllm.renderers.params import TokenizeParams

from vllm_kvevict.engine.frontend.chat import (
    ANSWERING,
    MARK,
    NUMBER,
    REFUSALS,
    WORD,
    Chat,
    may_be_cut,
    other_prompts,
    prefix_of_ids,
    text_before,
    unused_mark,
)
from vllm_kvevict.engine.frontend.counting import common_length
from vllm_kvevict.engine.request_options import facts_of
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS, RepeatPrompts

REPEAT_ALL = "Repeat the previous context exactly."
REPEAT_PART = "Repeat the part of the previous context exactly, starting with "

NOT_THINKING = {"enable_thinking": False, "thinking": False}
"""How templates are told that the assistant answers at once; those without such an argument do not see it."""

CONTEXT = 256
"""Characters before a text that are tokenised with it, so that its first token is what it is in the prompt."""


def repeat_prompts(renderer: BaseRenderer, prompt: Any, with_question: bool = False) -> RepeatPrompts:
    """What stands before the chunks of a prompt, or of its prefix, when the model repeats it.

    Args:
        renderer: has the tokenizer; without one (``--skip-tokenizer-init``) nothing stands there.
        prompt: as rendered.
        with_question: the whole prompt is repeated, not only what comes before its question.
    """
    if renderer.tokenizer is None:
        return RepeatPrompts((), (), ())
    chat = facts_of(prompt).chat
    found = None if chat is None else _in_words_of(chat, prompt, with_question)
    return found if found is not None and found.overhead <= MOST_EXTRA_ROWS else _in_plain_text(renderer)


def _in_plain_text(renderer: BaseRenderer) -> RepeatPrompts:
    """For prompts that are no chats: no special tokens, and a line of its own for what is repeated."""
    texts = (f"\n\n{REPEAT_ALL}\n", f"\n\n{REPEAT_PART}", "\n")
    return RepeatPrompts(*(_ids_behind(renderer, MARK, text) for text in texts))


def _in_words_of(chat: Chat, prompt: Any, with_question: bool) -> RepeatPrompts | None:
    """What the chat's template makes of the request to repeat, None where that cannot be told.

    Thinking is off, unless that changes what comes before.
    """
    if chat.question is None or may_be_cut(chat.tok_params, len(prompt["prompt_token_ids"])):
        return None
    find = _behind_reply if with_question else _behind_prefix
    for settings in ({**ANSWERING, **NOT_THINKING}, ANSWERING):
        try:
            found = find(chat, prompt, settings)
        except REFUSALS:
            continue
        if found is not None:
            return found
    return None


def _behind_reply(chat: Chat, prompt: Any, settings: Mapping[str, Any]) -> RepeatPrompts | None:
    """What stands behind the reply to a chat that goes on with the request to repeat it.

    Args:
        settings: further arguments of the template.
    """

    def render(reply: str, question: str) -> Any:
        return chat.rendered(chat.going_on(reply, question), settings)

    text = prompt.get("prompt", "")
    mark = unused_mark(text)
    hint = unused_mark(text + (mark or ""))
    if mark is None or hint is None:
        return None
    whole = render(mark, REPEAT_ALL)
    if "prompt_token_ids" in whole:
        return _behind_reply_ids(render)
    pieces = whole["prompt"].split(mark), render(mark, REPEAT_PART + hint)["prompt"].split(mark)
    if not all(len(parts) == 2 for parts in pieces):
        return None
    whole_text, part_text = (text + behind for _, behind in pieces)
    return _split_text(chat.renderer, text, whole_text, part_text, hint)


def _behind_reply_ids(render: Callable[[str, str], Any]) -> RepeatPrompts | None:
    """The same of tokens; two replies that end differently tell where a reply ends."""
    whole, other = (render(reply, REPEAT_ALL)["prompt_token_ids"] for reply in (WORD, NUMBER))
    behind = common_length(whole[::-1], other[::-1])
    parts = [render(WORD, REPEAT_PART + hint)["prompt_token_ids"] for hint in (WORD, NUMBER)]
    return None if whole == other else _split_ids(whole[: len(whole) - behind], whole, *parts)


def _behind_prefix(chat: Chat, prompt: Any, settings: Mapping[str, Any]) -> RepeatPrompts | None:
    """What stands behind the prefix of a chat that ends with the request to repeat it.

    Args:
        settings: further arguments of the template.
    """

    def ending_with(question: str) -> Any:
        return chat.rendered(chat.up_to(question), settings)

    ids, text = prompt["prompt_token_ids"], prompt.get("prompt", "")
    others, whole = other_prompts(chat, text), ending_with(REPEAT_ALL)
    if "prompt_token_ids" in whole:
        prefix_len = prefix_of_ids(ids, *others)
        parts = [ending_with(REPEAT_PART + hint)["prompt_token_ids"] for hint in (WORD, NUMBER)]
        return _split_ids(ids[:prefix_len], whole["prompt_token_ids"], *parts)
    before, mark = text_before(text, *others), unused_mark(text)
    if mark is None:
        return None
    part = ending_with(REPEAT_PART + mark)["prompt"]
    return _split_text(chat.renderer, before, whole["prompt"], part, mark)


def _split_text(
    renderer: BaseRenderer, before: str, whole: str, part: str, mark: str
) -> RepeatPrompts | None:
    """The tokens behind a text with which two others begin; the second one is split at a mark."""
    pieces = part.removeprefix(before).split(mark)
    if not (whole.startswith(before) and part.startswith(before)) or len(pieces) != 2:
        return None
    # The last token before a question is left out of the prefix, as it could merge with the question.
    first, hinted = (
        _ids_behind(renderer, before[-CONTEXT:], text, again=1)
        for text in (whole.removeprefix(before), pieces[0])
    )
    return RepeatPrompts(first, hinted, _ids_behind(renderer, mark, pieces[1]))


def _split_ids(
    begin: Sequence[int], whole: list[int], part: list[int], other_part: list[int]
) -> RepeatPrompts | None:
    """The same of tokens; two prompts that differ only where the hint stands tell where to split."""
    count = len(begin)
    if part == other_part or not all(ids[:count] == begin for ids in (whole, part, other_part)):
        return None
    same = common_length(part, other_part)
    after = common_length(part[same:][::-1], other_part[same:][::-1])
    return RepeatPrompts(tuple(whole[count:]), tuple(part[count:same]), tuple(part[len(part) - after :]))


def _ids_behind(renderer: BaseRenderer, before: str, text: str, again: int = 0) -> tuple[int, ...]:
    """The tokens of a text that stands behind another one, with so many of the last tokens before it."""
    params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
    before_ids, ids = (
        renderer.tokenize_prompt({"prompt": part}, params)["prompt_token_ids"]
        for part in (before, before + text)
    )
    return tuple(ids[common_length(before_ids[: len(before_ids) - again], ids) :])
