"""Questions on real text: the answer lies in the text, code tells right from wrong, and prompts have their length."""

import ast
import asyncio
import json
import random
import re

import pytest

from vllm_kvevict.quality import chats, questions, texts
from vllm_kvevict.quality.fitting import TextQuestions, fit
from vllm_kvevict.quality.questions import LABELS, TASKS, Draw
from vllm_kvevict.quality.texts import Fact, TextError

UNITS = (0, 1, 7, 60)


@pytest.fixture(params=TASKS)
def task(request) -> str:
    return request.param


def make(task: str, index: int = 0, size: int | None = None) -> questions.Question:
    return TASKS[task].make(Draw(random.Random(f"{task}{index}"), index, size or TASKS[task].size))


def said(question: questions.Question, units: int) -> str:
    return "\n".join(text for _, text in question.text(units))


def right(task: str, question: questions.Question) -> str:
    """What a perfect reply goes on with behind the given start."""
    joined = {"words": " and ", "multivalue": ", "}.get(task, " ").join(question.expected)
    code = {"json": ' "{}",\n', "signature": "({}):\n    pass", "name": " = {}\n"}
    forms = {**code, "copy": " {}", "words": " are {}.", "few-shot": " is {}\n"}
    return forms.get(task, " {}.\n").format(joined)


def test_the_right_answer_scores_and_wrong_ones_do_not(task):
    for index in range(10):
        question = make(task, index)
        reply = right(task, question)
        assert question.score(reply) == 1.0
        assert question.score("") == question.score(" I do not know.") == 0.0
        other = next(o for i in range(1, 9) if (o := make(task, index + i)).expected != question.expected)
        wrong = right(task, other)
        assert question.score(wrong) < 1.0
        if task not in ("copy", "name"):
            assert question.score(wrong) == 0.0


@pytest.mark.parametrize("units", UNITS)
def test_the_answer_lies_in_a_text_of_any_length(task, units):
    for index in range(5):
        question = make(task, index)
        text = said(question, units)
        if task == "few-shot":
            assert question.expected[0] in LABELS and text.count(f" is {question.expected[0]}") >= 5
        else:
            assert all(part in text for part in question.expected)
        assert len(said(question, units + 5)) > len(text)
        if task in ("copy", "signature", "name", "words", "json"):
            assert question.start in text


def test_most_digits_are_not_enough_and_commas_do_not_count():
    question = make("number")
    (number,) = question.expected
    assert question.score(f" {number[:-1]}") == question.score(f" {number}0") == 0.0
    assert question.score(f" {number[0]},{number[1:4]},{number[4:]}") == 1.0
    one, other = (several := make("multivalue")).expected
    assert several.score(f" {other} and {one}") == 1.0 and several.score(f" {one} and {one}") == 0.0


def test_copying_is_scored_up_to_the_first_difference():
    question = make("copy")
    words = question.expected[0].split()
    assert len(words) == 8
    assert question.score(" ".join(["no", *words[1:]])) == 0.0
    assert question.score(" ".join([*words[:6], "no", words[7], "more"])) == 6 / 8
    assert question.score(" ".join([*words, "and", "more"])) == 1.0
    assert question.score(" ".join(words[:4])) == 4 / 8


def test_part_of_a_value_is_wrong():
    question = make("json")
    first, second = question.expected[0].split()
    assert question.score(f' "{first}"') == question.score(f' "{first} {second} more"') == 0.0
    assert question.score(f" {first} {second}") == 0.0  # no JSON
    question = make("signature")
    begin = question.expected[0].rpartition(",")[0]
    assert question.score(f"({begin}):") == 0.0
    assert question.score("(" + question.expected[0].replace(", ", ",") + ")") == 1.0
    question = make("name")
    assert question.score(f" = {question.expected[0]}0\n") == 0.0
    assert question.score(f" = {question.expected[0]}  # why\nnext") == 1.0


def test_no_answer_is_its_first_token(task):
    """That is chosen before the prompt is evicted. A word may be a token; a number of seven digits is none."""
    if task in ("number", "multikey", "multivalue", "chat-needle"):
        assert all(re.fullmatch(r"\d{7}", part) for part in make(task).expected)
        return
    for index in range(10):
        question = make(task, index)
        (first,) = re.findall(r"^\s*(?:\w+|\W)", right(task, question))
        assert question.score(first) < 1.0


def test_facts_are_what_the_text_says_whatever_the_version_of_python():
    """Computed anew by running the sources' own lines; of functions from their syntax tree."""
    assert len(texts.signatures()) > 100 and len(texts.constants()) > 15
    for fact in texts.constants():
        line = texts.sources()[fact.module][fact.line]
        assert re.match(rf"{fact.name}\s*=", line)
        names: dict[str, object] = {}
        exec(line, {}, names)
        assert names == {fact.name: ast.literal_eval(fact.value)}
    for fact in texts.signatures():
        line = texts.sources()[fact.module][fact.line].strip()
        (made,) = ast.parse(f"{line} pass").body
        assert isinstance(made, ast.FunctionDef) and made.name == fact.name
        (other,) = ast.parse(f"def f({fact.value}): pass").body
        assert isinstance(other, ast.FunctionDef) and ast.dump(other.args) == ast.dump(made.args)


def test_a_name_that_is_set_twice_is_not_asked_for(monkeypatch):
    source = "SPEED = 12\nLIMIT = 15\nif LIMIT:\n    SPEED = 13\ndef move(x, y):\n    pass\nMODE = 'MODE'\n"
    texts.constants.cache_clear()
    monkeypatch.setattr(texts, "sources", lambda: {"made": tuple(source.splitlines())})
    try:
        assert texts.constants() == (Fact("LIMIT", "15", "made", 1),)
    finally:
        texts.constants.cache_clear()


def test_sentences_are_prose():
    found = texts.sentences()
    assert len(found) > 1000 and len(set(found)) == len(found)
    assert all(one[0].isupper() and one.endswith(".") and "\n" not in one for one in found)


def test_difficulty():
    question = make("json", size=24)
    (entries,) = re.findall(r"\{.*?\}", said(question, 5), re.S)
    assert len(json.loads(entries)) == 24
    text = said(make("multikey", size=4), 9)
    assert len(re.findall(r"is: \d{7}\.", text)) == 4
    assert len(make("multivalue", size=3).expected) == 3
    assert len(re.findall(r"is \d{7}\.", said(make("chat-needle", size=5), 9))) == 5
    for task, about in TASKS.items():
        for size in (about.sizes.start, about.sizes.stop - 1):
            assert make(task, size=size).score(" nothing at all") == 0.0


def asked(form: str, **changes) -> TextQuestions:
    defaults = {"names": list(TASKS), "tokens": [400], "samples": 2, "seed": 3, "sizes": {}, "slack": 8}
    return TextQuestions(form=form, **{**defaults, **changes})


def test_plain_prompts_and_chats_ask_the_same():
    for task in TASKS:
        chat, plain = (asked(form).case(task, 0, 0, 30) for form in ("chat", "plain"))
        assert chat.expected == plain.expected and chat.max_tokens == plain.max_tokens
        assert plain.prompt()["prompt"].endswith(f"\nAnswer: {chat.reply_start}")
        last = chat.prompt()["messages"][-1]
        assert last == {"role": "assistant", "content": chat.reply_start}
        assert chat.prompt()["continue_final_message"] and chat.has_prefix and plain.has_prefix


@pytest.mark.parametrize("name", [*TASKS, *chats.TASKS])
def test_samples_depend_on_seed_and_size_only(name):
    size = {**TASKS, **chats.TASKS}[name].sizes.stop - 1

    def told(**changes):
        questions = asked("chat", **{"names": [name], **changes})
        return questions.case(name, 9, 1, 20).prompt(), questions.fingerprints()[f"text/{name}"]

    same = told()
    assert told(samples=5, names=["number", name], tokens=[99]) == same
    assert told(seed=4)[0] != same[0] and told(sizes={name: size})[0] != same[0]
    assert told(sizes={name: size})[1] != same[1]


@pytest.mark.parametrize("tokens", [800, 1024, 5000])
@pytest.mark.parametrize("name", TASKS)
def test_prompts_have_the_wanted_length(name, tokens):
    wanted = asked("chat", tokens=[tokens])
    made = {}

    def make(units: int):
        case = wanted.case(name, tokens, 0, units)
        made[case.context, case.turns] = units
        return case

    def length(case) -> int:
        return len(re.findall(r"\w{1,5}|[^\w\s]", json.dumps(case.prompt())))

    async def count(case) -> int:
        return length(case)

    units = asyncio.run(fit(make, tokens, count))
    assert tokens - 100 < length(make(units)) <= tokens and len(made) <= 16
    assert length(make(units + 1)) > tokens  # control: nothing longer would fit


def test_a_length_that_no_question_fits_is_an_error():
    async def count(case) -> int:
        return 100

    with pytest.raises(TextError, match="--tokens 99: a question of text/json needs at least 100 tokens"):
        asyncio.run(fit(lambda units: asked("chat").case("json", 99, 0, units), 99, count))
