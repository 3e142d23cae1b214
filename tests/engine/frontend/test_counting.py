"""Tokens before places in a prompt's text, against tokenising all that comes before them."""

import random

import pytest

from tests.engine.support.chats import DOCUMENT, SPECIAL
from vllm_kvevict.engine.frontend import counting
from vllm_kvevict.engine.frontend.counting import common_length, tokens_before

START, END = "<|im_start|>", "<|im_end|>"
CHAT = f"{START}user\n{DOCUMENT}{END}\n{START}user"
PIECES = [*SPECIAL, "<|im_", "user", " ", "\n\n", "x", "Rotterdam", "\U0001f600", "é", "467 million"]


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers(scope="prefix")


@pytest.fixture
def count(renderer):
    """Counts the tokens before one place or several; of other tokens than the text's if they are given."""

    def counted(text, *places, ids=None):
        ids = tokenised(renderer, text) if ids is None else ids
        return tokens_before(renderer, renderer.default_chat_tok_params, text, ids, places)

    return counted


def tokenised(renderer, text):
    return renderer.tokenize_prompt({"prompt": text}, renderer.default_chat_tok_params)["prompt_token_ids"]


def test_it_is_what_the_text_before_the_place_alone_would_give(renderer, count):
    rng = random.Random(0)
    counted = 0
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 30)))
        place = rng.randrange(len(text) + 1)
        found = count(text, place)
        before = tokenised(renderer, text[:place])
        assert (found is None) == (not set(before) & set(range(len(SPECIAL))))
        if found is not None:
            assert found == [common_length(before[:-1], tokenised(renderer, text))]
            counted += 1
    assert counted > 200


def test_several_places_in_any_order(count):
    places = [len(CHAT), len(START) + 2, CHAT.rindex(START) + 3, len(CHAT) - 1]
    assert count(CHAT, *places) == [count(CHAT, place)[0] for place in places]
    assert count(CHAT) == []


def test_no_added_token_no_count(count):
    assert count(DOCUMENT, len(DOCUMENT)) is None
    assert count(CHAT, len(CHAT), len(START) - 1) is None
    assert count("", 0) is None


def test_no_more_is_tokenised_than_the_prompt(count):
    one = f"{START}{DOCUMENT}"
    assert count(one, len(one)) is not None and count(one, len(one), len(one) - 5) is None


def test_tokens_of_another_text_do_not_count(renderer, count):
    ids = tokenised(renderer, CHAT)
    start, end = (SPECIAL.index(token) for token in (START, END))
    (whole,) = count(CHAT, len(CHAT))
    assert ids[:whole].count(start) == 2
    # One is missing: the other kind tells, as far as tokens and text agree.
    without_start = [*ids[1 : ids.index(end) + 1], 0, 0, 0]
    assert count(CHAT, len(CHAT), ids=without_start) == [ids.index(end)]
    assert count(CHAT, len(CHAT), ids=[token for token in ids if token not in (start, end)]) is None


def test_a_text_full_of_added_tokens_is_searched_for_few(count, monkeypatch):
    text = "".join(SPECIAL) + 3 * START
    place = text.index(START)
    whole, last = count(text, place), count(text, len(text))
    assert whole == [SPECIAL.index(START) - 1] and last == [len(SPECIAL) + 2]
    monkeypatch.setattr(counting, "MOST_KINDS", 1)
    assert count(text, place) is None and count(text, len(text)) == last


def test_twice_the_turns_are_twice_the_work(renderer):
    def looked_at(turns):
        text = turns * f"{START}user\nx{END}\n"
        ids = Counted(tokenised(renderer, text))
        places = [number * len(text) // turns + len(START) + 4 for number in range(turns)]
        assert len(tokens_before(renderer, renderer.default_chat_tok_params, text, ids, places)) == turns
        return ids.looked_at

    sizes = [looked_at(turns) for turns in (100, 200, 400)]
    assert sizes[1] <= 2.2 * sizes[0] and sizes[2] <= 2.2 * sizes[1]


class Counted(list):
    """Counts how many of its items are looked at."""

    looked_at = 0

    def __iter__(self):
        self.looked_at += len(self)
        return super().__iter__()

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found
