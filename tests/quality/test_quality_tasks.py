"""The generated tasks: what they hide can be found, they have their length, and a seed decides all of it."""

import random

import pytest

from vllm_kvevict.quality.tasks import FUNCTION_WORDS, TASKS, make, make_many, names, score, values, words

LENGTHS = (60, 500)
IN_THE_TEXT = tuple(task for task in TASKS if task != "count")  # how often a name occurs is written nowhere
LONGEST_SENTENCE = 12


@pytest.fixture(params=TASKS)
def task(request) -> str:
    return request.param


def test_words_are_unique_and_names_are_no_values():
    assert len(set(words())) == len(words())
    assert not set(names()) & set(values())
    assert not set(words()) & set(FUNCTION_WORDS)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_expected_strings_occur_and_the_answer_scores(task, length, seed):
    sample = make(task, length, random.Random(seed))
    if task in IN_THE_TEXT:
        assert all(f" {part} " in f" {sample.context} " for part in sample.expected)
    assert score(sample, sample.answer) == 1.0
    assert score(sample, f"well\n {sample.answer}  .") == 1.0
    assert score(sample, "") == score(sample, sample.question) == 0.0


@pytest.mark.parametrize("length", LENGTHS)
def test_length(task, length):
    for seed in range(3):
        size = len(make(task, length, random.Random(seed)).context.split())
        assert length <= size <= length + LONGEST_SENTENCE


def test_a_seed_decides(task):
    assert make(task, 200, random.Random(5)) == make(task, 200, random.Random(5))
    assert make(task, 200, random.Random(5)).context != make(task, 200, random.Random(6)).context


@pytest.mark.parametrize("length", [300, 2048])
def test_questions_about_one_text_do_not_touch_each_other(length):
    asked = ["single", "multivalue", "chain", "multiquery", "facts", "multikey"] * 3
    samples = make_many(asked, length, random.Random(1))
    assert [sample.task for sample in samples] == asked and len({sample.context for sample in samples}) == 1
    assert length <= len(samples[0].context.split()) <= length + LONGEST_SENTENCE
    for sample in samples:
        assert all(f" {part} " in f" {sample.context} " for part in sample.expected)
        assert score(sample, sample.answer) == 1.0 and 0 <= sample.depth <= 1
    questions = [{*sample.question.split()} & {*names()} for sample in samples]
    assert all(questions) and len(set.union(*questions)) == sum(map(len, questions))
    assert samples == make_many(asked, length, random.Random(1)) != make_many(asked, length, random.Random(2))


def test_the_asked_name_has_one_record_only():
    for seed in range(5):
        sample = make("multikey", 800, random.Random(seed))
        name = sample.question.split()[1]
        assert sample.context.split().count(name) == 1


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth(depth):
    for seed in range(3):
        sample = make("single", 1000, random.Random(seed), depth)
        text = sample.context.split()
        assert sample.depth == pytest.approx(depth, abs=0.01)
        assert text.index(sample.question.split()[1]) / len(text) == pytest.approx(depth, abs=0.02)


def test_partial_score():
    sample = make("multiquery", 200, random.Random(0))
    assert len(sample.expected) == 3
    assert score(sample, sample.expected[1]) == pytest.approx(1 / 3)


def test_a_part_of_a_word_does_not_count():
    sample = make("single", 60, random.Random(0))
    assert score(sample, f"x{sample.expected[0]}") == 0.0
