"""Chats of eight turns: who asks reads the same chat, answers are where they should be, and turns are long enough."""

import asyncio
import itertools
import re
from collections import Counter

import pytest

from tests.real_model import real_model
from vllm_kvevict.quality import chats
from vllm_kvevict.quality.cases import Case
from vllm_kvevict.quality.chats import KINDS, TASKS, asked_in, told_in
from vllm_kvevict.quality.fitting import TextQuestions, cases

CHATS, UNITS, LEAST = 16, 70, 256
TOKENS = 2304
OF_TURNS = {f"turns-{kind}": kind for kind in KINDS}
TOLD_BY_USER = [task for task in TASKS if task != "call"]


def asked(**changes) -> TextQuestions:
    defaults = {"names": list(TASKS), "tokens": [TOKENS], "samples": 2, "seed": 3, "sizes": {}, "slack": 8}
    return TextQuestions(form="chat", **{**defaults, **changes})


def messages(task: str, chat: int, **changes) -> list[dict[str, str]]:
    return asked(**changes).case(task, TOKENS, chat, UNITS).prompt()["messages"]


def answered(task: str, chat: int) -> tuple[str, list[int]]:
    """What the chat says behind the beginning of the answer, and the user's messages that say so."""
    question = asked().question(task, chat)
    said = [text for role, text in question.text(UNITS) if role == "user"]
    places = [i for i, text in enumerate(said) if question.start in text]
    return said[places[0]].split(question.start, 1)[1], places


@pytest.mark.parametrize("task", TOLD_BY_USER)
def test_the_answer_is_told_once_and_found_and_wrong_ones_are_not(task):
    for chat in range(CHATS):
        right, places = answered(task, chat)
        assert places == [told_in(OF_TURNS[task], chat) - 1 if task in OF_TURNS else 0]
        question = asked().question(task, chat)
        assert question.score(right) == question.score(right.split("\n")[0]) == 1.0
        assert question.score("") == question.score(" I do not know.") == 0.0
        other, _ = answered(task, (chat + 1) % CHATS)
        assert question.score(other) == 0.0
        # A part of the answer is not enough.
        assert question.score(right[: right.index(question.expected[-1]) + 2]) == 0.0


def test_sixteen_chats_tell_and_ask_each_fact_in_each_pair_of_turns():
    for kind in KINDS:
        pairs = Counter((told_in(kind, chat), asked_in(kind, chat)) for chat in range(CHATS))
        assert pairs == dict.fromkeys(itertools.product(range(1, 5), range(5, 9)), 1)
    for chat in range(CHATS):
        for turns in ({told_in(kind, chat) for kind in KINDS}, {asked_in(kind, chat) for kind in KINDS}):
            assert len(turns) == 4


def test_all_questions_are_about_one_chat_with_the_right_answers_in_it():
    for chat in range(4):
        by_turn = {asked_in(kind, chat): task for task, kind in OF_TURNS.items()}
        longest = messages(by_turn[chats.TURNS], chat)
        for turn, task in by_turn.items():
            mine = messages(task, chat)
            before, question, start = mine[: 2 * turn - 2], mine[-2], mine[-1]
            assert before == longest[: len(before)] and len(mine) == 2 * turn
            assert [m["role"] for m in mine] == ["user", "assistant"] * turn
            if turn < chats.TURNS:
                later = longest[2 * turn - 2 : 2 * turn]
                assert later[0]["content"].startswith(question["content"])
                right = later[1]["content"].removeprefix(start["content"])
                assert right != later[1]["content"]
                assert asked().question(task, chat).score(right) == 1.0


def test_the_task_is_asked_for_behind_results_of_tools():
    roles = [m["role"] for m in messages("tools-number", 0)]
    assert Counter(roles)["tool"] == chats.RESULTS and roles[-2:] == ["user", "assistant"]
    assert roles[-4:-2] == ["tool", "assistant"]
    number, phones = (messages(f"tools-{kind}", 0) for kind in chats.TOOL_KINDS)
    assert number[:-2] == phones[:-2] and number[-2:] != phones[-2:]


def test_a_tool_of_the_instructions_is_called_behind_another_turn():
    for chat in range(CHATS):
        case = asked().case("call", TOKENS, chat, UNITS)
        said = case.prompt()["messages"]
        assert [m["role"] for m in said] == ["system", "user", "assistant", "user", "assistant"]
        instructions, start = said[0]["content"], said[-1]["content"]
        _, right = instructions.split(start)
        # No other tool has its name, or one of its parameters.
        (answer,) = case.expected
        names = answer.strip("()").split(", ")
        assert right.startswith(f"{answer}:\n") and len(names) in (2, 3)
        signatures = re.findall(r"def (\w+)\((.*)\):", instructions)
        words = {word for name, _ in signatures for word in name.split("_")}
        assert len(signatures) == 7 and len(words) == 14
        listed = [name for _, names in signatures for name in names.split(", ")]
        assert len(set(listed)) == len(listed) and all(name in listed for name in names)
        assert not any(answer in message["content"] for message in said[1:])
        score = case.score
        assert score(right) == score(answer) == 1.0
        assert score("") == score(answer[:-1]) == score(f"({names[1]}, {names[0]})") == 0.0


class Counting:
    """An endpoint that counts the tokens of the real model."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(real_model())

    async def tokenize(self, prompt) -> list[int]:
        going_on = prompt.get("continue_final_message", False)
        text = self.tokenizer.apply_chat_template(
            prompt["messages"], tokenize=False, continue_final_message=going_on
        )
        return self.tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def fitted() -> tuple[Counting, list[Case]]:
    """Two chats of each task, as long as they are to be."""
    counting = Counting()
    return counting, asyncio.run(cases(asked(seed=2026), counting, 4, lambda: None))


def test_every_turn_is_compressed_on_its_own_with_the_real_tokenizer(fitted):
    counting, found = fitted

    def length(said: list[dict[str, str]]) -> int:
        return len(asyncio.run(counting.tokenize({"messages": said})))

    for case in found:
        said = case.prompt()["messages"]
        assert length(said[:-1]) <= TOKENS
        ends = [i for i in range(1, len(said) - 1) if said[i - 1]["role"] == "assistant" != said[i]["role"]]
        if "turns-" in case.task:
            lengths = [0, *(length(said[:end]) for end in ends)]
            steps = [later - earlier for earlier, later in itertools.pairwise(lengths)]
            assert len(steps) == asked_in(case.task.removeprefix("text/turns-"), case.index) - 1
            assert min(steps) >= LEAST


def test_questions_about_one_chat_share_its_text_when_it_is_fitted(fitted):
    _, found = fitted
    for chat, kind in itertools.product(range(2), ("turns", "tools")):
        mine = [c for c in found if c.index == chat and kind in c.task]
        before = sorted((c.prompt()["messages"][:-2] for c in mine), key=len)
        assert len(before) == (len(KINDS) if kind == "turns" else len(chats.TOOL_KINDS))
        for earlier, later in itertools.pairwise(before):
            if kind == "tools":
                assert earlier == later
            else:
                assert earlier == later[: len(earlier)] and len(earlier) < len(later)
