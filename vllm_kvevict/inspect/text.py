"""The text that each token of a prompt stands for, so that all of them together are the prompt."""

from collections.abc import Sequence
from typing import Any

from vllm_kvevict.inspect.data import Prompt

WINDOW = 8
"""How many tokens are decoded with a token, where the tokenizer gives no offsets: more than a character has."""


def tokenize(tokenizer: Any, text: str, with_special: bool = True) -> Prompt:
    """Cut a prompt into tokens.

    Args:
        tokenizer: as transformers or vLLM make it.
        text: of the prompt.
        with_special: whether the tokenizer adds tokens; a chat template has written them into the text.
    """
    given = {} if with_special else {"add_special_tokens": False}
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, return_offsets_mapping=True, **given)
        ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
        added = [
            index
            for index, (token, (start, stop)) in enumerate(zip(ids, spans, strict=True))
            if start == stop and token in tokenizer.all_special_ids
        ]
        texts = _by_offsets(text, spans, set(added))
    else:
        ids = list(tokenizer.encode(text, **given))
        added = [index for index, token in enumerate(ids) if token in tokenizer.all_special_ids]
        texts = _by_decoding(tokenizer, ids, set(added))
    for index in added:
        texts[index] = str(tokenizer.convert_ids_to_tokens([ids[index]])[0])
    return Prompt(ids, texts, added)


def _by_offsets(text: str, spans: Sequence[tuple[int, int]], added: set[int]) -> list[str]:
    """Texts by the tokens' offsets. What lies between two tokens, such as a space, belongs to the second one."""
    texts, done = [], 0
    for index, (_, stop) in enumerate(spans):
        stop = done if index in added else max(done, stop)
        texts.append(text[done:stop])
        done = stop
    last = max((index for index in range(len(texts)) if index not in added), default=None)
    if last is not None:
        texts[last] += text[done:]
    return _from_the_first(texts, added)


def _by_decoding(tokenizer: Any, ids: Sequence[int], added: set[int]) -> list[str]:
    """Texts by decoding: what tokens add to those before them, once they end a character."""
    texts, first = [""] * len(ids), 0
    for index in range(len(ids)):
        if index in added:
            first = index + 1
            continue
        start = max(0, first - WINDOW)
        before, now = (tokenizer.decode(list(ids[start:stop])) for stop in (first, index + 1))
        is_part = now.endswith("\ufffd") and index - first < WINDOW and index + 1 < len(ids)
        if not is_part:
            texts[first] = now[len(before) :]
            first = index + 1
    return _from_the_first(texts, added)


def _from_the_first(texts: list[str], added: set[int]) -> list[str]:
    """Let the text begin with the first token: it may have none, such as a space that the tokenizer puts in front."""
    first = next((index for index in range(len(texts)) if index not in added), None)
    filled = next((index for index, text in enumerate(texts) if text and index not in added), None)
    if first is not None and filled is not None and first < filled:
        texts[first], texts[filled] = texts[filled], ""
    return texts
