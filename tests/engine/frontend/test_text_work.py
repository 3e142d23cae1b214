"""Work on the text of clients grows as the text does, whatever they write: all requests share its threads."""

import random

import pytest

from vllm_kvevict.engine.frontend.chat import prefix_of_ids
from vllm_kvevict.engine.frontend.counting import common_length
from vllm_kvevict.engine.frontend.media import tokens_before

IMAGE = 3
"""Tokens of an image in a prompt; in the template's text it is one."""


class Token(int):
    """Counts how often tokens are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def tokens(numbers):
    """Each a thing of its own: Python does not compare a thing with itself."""
    return [Token(number) for number in numbers]


def one_word(size):
    return [7] * size


def almost_one_word(size):
    return [*[7] * (size - 1), 8]


def words_that_repeat_later(size):
    return [7, *[7, 8] * (size // 2)][:size]


TEXTS = (one_word, almost_one_word, words_that_repeat_later)


@pytest.mark.parametrize("before", TEXTS)
@pytest.mark.parametrize("after", TEXTS)
def test_twice_the_text_is_twice_the_work(before, after):
    def compared(size):
        Token.compared = 0
        first, second = tokens([1, *before(size)]), tokens([*[0] * IMAGE, *after(size)])
        tokens_before(first, second, [range(IMAGE)])
        common_length(first, tokens(first))
        prefix_of_ids(first, {"prompt_token_ids": second}, {"prompt_token_ids": tokens(first)})
        return Token.compared

    sizes = [compared(size) for size in (200, 400, 800)]
    assert sizes[1] <= 2.2 * sizes[0] and sizes[2] <= 2.2 * sizes[1]


def test_tokens_before_a_question_behind_an_image():
    """The longest end of the first part that stands behind the image in the prompt; counted one by one."""
    rng = random.Random(0)
    for _ in range(2000):
        text = [rng.randrange(2) for _ in range(rng.randrange(9))]
        rest = [rng.randrange(2) for _ in range(rng.randrange(9))]
        before, prompt = [5, 9, *text], [5, *[9] * IMAGE, *rest]
        same = [n for n in range(len(rest) + 1) if n <= len(before) and before[len(before) - n :] == rest[:n]]
        assert tokens_before(before, prompt, [range(1, 1 + IMAGE)]) == 1 + IMAGE + max(same)
