"""Images, audio and video in prompts: where they are, and chats that are rendered once more without loading them."""

from collections.abc import Sequence
from typing import Any

from vllm.renderers.base import BaseRenderer

MEDIA_PARTS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_pil": "image_url",
    "image_embeds": "image_url",
    "audio_url": "audio_url",
    "input_audio": "audio_url",
    "audio_embeds": "audio_url",
    "video_url": "video_url",
    "video_embeds": "video_url",
}
"""Entries of a message's part that hold media, and the one that may stand for it when only its name is given."""

NAME = "kv-media"
"""Of media that are not loaded: vLLM then puts their placeholders into the text, and nothing else."""


def has_media(prompt: Any) -> bool:
    """Whether a prompt, as rendered for the engine, has other contents than text."""
    return isinstance(prompt, dict) and bool(prompt.get("mm_placeholders"))


def invalidate(renderer: BaseRenderer, prompt: Any) -> None:
    """Let the media of a refused prompt be sent with the next one that has them.

    vLLM notes media as sent when a prompt is rendered, and sends each of them once.
    """
    cache, hashes = renderer.mm_processor_cache, prompt.get("mm_hashes") if isinstance(prompt, dict) else None
    if cache is None or not hashes:
        return
    for each in hashes.values():
        for media_hash in each:
            cache.invalidate(media_hash)


def placeholders(prompt: Any) -> list[range]:
    """The tokens of a rendered prompt that stand for each of its media, in their order."""
    found = (prompt.get("mm_placeholders") or {}) if isinstance(prompt, dict) else {}
    ranges = [range(x.offset, x.offset + x.length) for each in found.values() for x in each]
    return sorted(ranges, key=lambda tokens: tokens.start)


def without_media(messages: Sequence[Any]) -> list[Any]:
    """The same messages with the names of media in place of their contents, which would be loaded again."""
    return [_message_without_media(message) for message in messages]


def count_media(messages: Sequence[Any]) -> int:
    """Images, audio and video in messages."""
    return sum(_kind_of(part) is not None for message in messages for part in _parts(message))


def _message_without_media(message: Any) -> Any:
    if not _parts(message):
        return message
    return {**message, "content": [_part_without_media(part) for part in message["content"]]}


def _part_without_media(part: Any) -> Any:
    kind = _kind_of(part)
    return part if kind is None else {"type": kind, kind: None, "uuid": NAME}


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _kind_of(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    return next((kind for name, kind in MEDIA_PARTS.items() if name in part), None)


def tokens_before(before_ids: Sequence[int], ids: Sequence[int], media: Sequence[range]) -> int:
    """Count the tokens of a prompt that come from its first part, which has media in it.

    What stands for the media is longer in the prompt; the text behind the last of them is the same.

    Args:
        before_ids: the tokens of the first part, with a mark in place of each of its media.
        ids: of the prompt.
        media: where in ``ids`` the media of the first part are, at least one.
    """
    end = media[-1].stop
    longest = min(len(before_ids), len(ids) - end)
    return end + overlap(before_ids[len(before_ids) - longest :], ids[end : end + longest])


def overlap(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which one sequence ends and another, as long as it, begins: the most that are the same.

    By the algorithm of Knuth, Morris and Pratt: clients choose the text, and no text may make this quadratic.
    """
    # How much of the part that ends at each token is left to try after a difference.
    shorter = [0] * len(second)
    length = 0
    for place in range(1, len(second)):
        length = shorter[place] = _matched(second, shorter, length, second[place])
    length = 0
    for token in first:
        length = _matched(second, shorter, length, token)
    return length


def _matched(tokens: Sequence[int], shorter: Sequence[int], length: int, token: int) -> int:
    """How many of the first tokens a sequence ends with after one more token, if it ended with so many before it."""
    while length and tokens[length] != token:
        length = shorter[length - 1]
    return length + (tokens[length] == token)
