"""How many of a prompt's tokens come before places in its text, without tokenising all of that once more.

Tokenizers first take added tokens out of a text, such as those with which templates begin and end messages, and then
treat each stretch between two of them on its own. So the last added token before a place divides the prompt: its number
says where it is among the tokens, and only what follows it up to the place is tokenised.
"""

import bisect
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.renderers.base import BaseRenderer

MOST_KINDS = 8
"""Of added tokens in a prompt that are looked for in its text, the most frequent ones: a text may have hundreds."""


class Divider(NamedTuple):
    """An added token: where in the text it ends and begins, and how many tokens come before it."""

    end: int
    begin: int
    before: int


def tokens_before(
    renderer: BaseRenderer, tok_params: Any, text: str, ids: Sequence[int], places: Sequence[int]
) -> list[int] | None:
    """Count the tokens of a prompt that end before each of some places in its text.

    A token that ends at a place is left out, since it could be another one if other text followed.

    Args:
        renderer: what tokenised the prompt.
        tok_params: how.
        text: the prompt.
        ids: its tokens.
        places: in the text, in any order.

    Returns:
        None if some place has no added token before it, or there would be more to tokenise than the prompt.
    """
    dividers = find_dividers(renderer.get_tokenizer(), text, ids)
    # Of those that end at the place or before it; nothing is as large as the text is long.
    numbers = [bisect.bisect_right(dividers, (place, len(text) + 1)) - 1 for place in places]
    if min(numbers, default=0) < 0:
        return None
    spans = [(dividers[number].begin, place) for number, place in zip(numbers, places, strict=True)]
    if sum(place - begin for begin, place in set(spans)) > len(text):
        return None
    stretches = [text[begin:place] for begin, place in spans]
    params = dataclasses.replace(tok_params, add_special_tokens=False)
    tokenised = {
        stretch: renderer.tokenize_prompt({"prompt": stretch}, params)["prompt_token_ids"][:-1]
        for stretch in dict.fromkeys(stretches)
    }
    counts = []
    for number, stretch in zip(numbers, stretches, strict=True):
        before, own = dividers[number].before, tokenised[stretch]
        counts.append(before + common_length(own, ids[before : before + len(own)]))
    return counts


def find_dividers(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Divider]:
    """The added tokens of a prompt that can be told in its text as among its tokens, in their order.

    A kind counts if there are as many in both: then they are the same ones. A token that was added to the text does not
    pass, nor one whose text stands where it is none.
    """
    contents = _contents(tokenizer)
    indices = defaultdict(list)
    for index, token in enumerate(ids):
        if token in contents:
            indices[token].append(index)
    dividers = []
    for token in sorted(indices, key=lambda token: -len(indices[token]))[:MOST_KINDS]:
        found = [match.span() for match in re.finditer(re.escape(contents[token]), text)]
        if len(found) == len(indices[token]):
            dividers += [
                Divider(end, begin, i) for (begin, end), i in zip(found, indices[token], strict=True)
            ]
    return sorted(dividers)


@functools.lru_cache(maxsize=8)
def _contents(tokenizer: Any) -> dict[int, str]:
    """What a tokenizer's added tokens look like in a text; transformers makes that list anew each time."""
    return {token: content for content, token in tokenizer.get_added_vocab().items() if content}


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
