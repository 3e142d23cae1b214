"""Where the turns of a chat end, for servers that compress a chat turn by turn.

A turn ends where an answer does: before the first message of somebody else behind it. Instructions and tools, which
come before the first user message, are a turn, too. All ends are found by one more rendering of the chat with a mark in
each message behind an end: what comes before a mark does not depend on what follows it, whatever the template makes of
roles, tools and earlier turns. Beginnings of the chat are never rendered: that would take the square of the messages,
and templates that forget thoughts write a beginning in another way than the whole chat.

An end is lasting if all before it stays the same when the chat goes on with another question. The others hold until
then, through rounds of tools: templates remove thoughts there, or move instructions. So what is left of them is the
first to go; and the last end, if it is not lasting, waits for the next question, unless a round of tools has begun.

The end before the first user message is noted besides, for servers that keep instructions and tools whole.
"""

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.logger import init_logger

from vllm_kvevict.engine.frontend import media
from vllm_kvevict.engine.frontend.chat import (
    ANSWERING,
    IS_CUT,
    REFUSALS,
    WORD,
    Chat,
    QuestionNotFoundError,
    find_prefix,
    may_be_cut,
    name_of,
    note_changes,
)
from vllm_kvevict.engine.frontend.counting import common_length, tokens_before
from vllm_kvevict.engine.frontend.marks import render_marked
from vllm_kvevict.engine.request_options import ChatFacts

logger = init_logger("vllm.kv_eviction")

DROPS_THOUGHTS = "it drops reasoning, or the empty place for it, once the user asks again"
MOVES = "it writes earlier messages in another way once the user asks again, or moves instructions to the last question"
REFUSES = "it refuses a chat that goes on"

THOUGHTS = re.compile("think|reason|thought", re.IGNORECASE)
NEAR = 16
"""Characters around a difference in which a word of :data:`THOUGHTS` says what it is about."""


class Ends(NamedTuple):
    """Where in a prompt's text its turns end: those that are lasting, the others, and the one before the first user
    message, None if that is not among them."""

    lasting: list[int]
    passing: list[int]
    before_user: int | None


def find_turns(facts: ChatFacts, prompt: Any) -> list[int]:
    """Count the tokens of a rendered chat up to the end of each of its turns; ascending.

    Where marks cannot tell, the only end is that before the question: in prompts without text, or with images, whose
    tokens are not those of the text, and with tokenizers that do not say where tokens stand.

    Args:
        facts: what was rendered; gets notes of up to which token the ends are lasting, if others follow, and of the
            end before the first user message.
        prompt: the result, with ``prompt_token_ids``.

    Raises:
        QuestionNotFoundError: the chat was cut, or its question has to be found and is not.
    """
    chat, text, ids = facts.chat, prompt.get("prompt"), prompt["prompt_token_ids"]
    if may_be_cut(chat.tok_params, len(ids)):
        raise QuestionNotFoundError(IS_CUT)
    found = None if text is None or media.placeholders(prompt) else ends_in_text(facts, prompt)
    tokens = None if found is None else count_tokens(chat, text, ids, [*found.lasting, *found.passing])
    if found is None or tokens is None:
        return [end for end in [find_prefix(facts, prompt)] if end]
    lasting, passing = (
        sorted({tokens[end] for end in ends} - {0}) for ends in (found.lasting, found.passing)
    )
    if chat.messages[-1]["role"] != "tool":
        passing = passing[:-1]
    if passing:
        facts.lasting = lasting[-1] if lasting else 0
    turns = sorted({*lasting, *passing})
    if found.before_user is not None and tokens[found.before_user] in turns:
        facts.whole = tokens[found.before_user]
    return turns


def count_tokens(chat: Chat, text: str, ids: Sequence[int], places: Sequence[int]) -> dict[int, int] | None:
    """How many tokens of a prompt end before each of some places in its text; None if the tokenizer does not tell."""
    counts = tokens_before(chat.renderer, chat.tok_params, text, ids, places)
    if counts is None:
        ends = ends_of_tokens(chat, text, ids)
        # A token that ends with the text before a message could be another one if the message began differently.
        counts = None if ends is None else [bisect.bisect_left(ends, place) for place in places]
    return None if counts is None else dict(zip(places, counts, strict=True))


def ends_of_tokens(chat: Chat, text: str, ids: Sequence[int]) -> list[int] | None:
    """Where in a prompt's text each token ends, or an earlier one if that ends later.

    Returns:
        None if the tokenizer does not tell, or makes other tokens of the text.
    """
    params = dataclasses.replace(chat.tok_params, return_token_offsets=True)
    again = chat.renderer.tokenize_prompt({"prompt": text}, params)
    offsets = again.get("prompt_token_offsets")
    if offsets is None or list(again["prompt_token_ids"]) != list(ids):
        return None
    return list(itertools.accumulate((end for _, end in offsets), max))


def ends_in_text(facts: ChatFacts, prompt: Any) -> Ends | None:
    """Where in a prompt's text its turns end; None if the template refuses marks.

    A template that writes something else each time is noted in the facts, and one that takes ends back in the log.
    """
    chat, text = facts.chat, prompt["prompt"]
    roles = [message["role"] for message in chat.messages]
    turns = messages_behind_turns(roles)
    try:
        marked = render_marked(chat, text, itertools.chain(*turns))
    except REFUSALS:
        return None
    shown = [[marked.places[index] for index in turn if index in marked.places] for turn in turns]
    # Some templates sort the answers of tools.
    places = longest_ascending([min(turn) for turn in shown if turn])
    if marked.text != text:
        same = common_length(marked.text, text)
        places = [place for place in places if place <= same]
        note_changes(facts, prompt)
    count = bisect.bisect_right(places, _lasting_until(chat, text, places))
    ends = {place: end_of_text(text, place) for place in places}
    before_user = ends.get(marked.places.get(roles.index("user"), -1)) if "user" in roles else None
    return Ends([ends[x] for x in places[:count]], [ends[x] for x in places[count:]], before_user)


def messages_behind_turns(roles: Sequence[str]) -> list[range]:
    """The messages before which turns end, by their indices: one for each turn, or several answers of tools.

    Args:
        roles: of all messages.
    """
    first_user = roles.index("user") if "user" in roles else None
    turns = []
    for index, role in enumerate(roles):
        follows = index > 0 and roles[index - 1] == "assistant"
        if role != "assistant" and (follows or index == first_user):
            turns.append(range(index, _behind_tools(roles, index + 1) if role == "tool" else index + 1))
    return turns


def _behind_tools(roles: Sequence[str], index: int) -> int:
    """The first index, from one on, of a message that is no tool's."""
    while index < len(roles) and roles[index] == "tool":
        index += 1
    return index


def longest_ascending(places: Sequence[int]) -> list[int]:
    """The most of some places that are in order: a message that the template has moved costs no other one its place."""
    # Of the ascending sequences of each length, the last place that is lowest; and what came before it.
    lowest: list[int] = []
    before: dict[int, int | None] = {}
    for place in places:
        length = bisect.bisect_left(lowest, place)
        before[place] = lowest[length - 1] if length else None
        lowest[length : length + 1] = [place]
    found, place_before = [], lowest[-1] if lowest else None
    while place_before is not None:
        found.append(place_before)
        place_before = before[place_before]
    return found[::-1]


def end_of_text(text: str, place: int) -> int:
    """Where the text before a place ends, without the whitespace behind it."""
    while place and text[place - 1].isspace():
        place -= 1
    return place


def _lasting_until(chat: Chat, text: str, places: Sequence[int]) -> int:
    """Up to where a prompt's text stays the same when the chat goes on; to its end if the template refuses to say.

    Says once of a template that it writes earlier turns differently later on.
    """
    try:
        goes_on = chat.rendered(chat.going_on(WORD, WORD), ANSWERING)["prompt"]
    except REFUSALS:
        _log_not_lasting(chat.params.chat_template, REFUSES)
        return len(text)
    lasting = common_length(text, goes_on)
    if places and places[-1] > lasting:
        near = text[max(lasting - NEAR, 0) : lasting + NEAR]
        _log_not_lasting(chat.params.chat_template, DROPS_THOUGHTS if THOUGHTS.search(near) else MOVES)
    return lasting


@functools.lru_cache(maxsize=256)
def _log_not_lasting(template: str | None, reason: str) -> None:
    logger.warning(
        "KV eviction: with %s the last turns of some chats are compressed again when the user asks the next question: "
        "%s",
        name_of(template),
        reason,
    )
