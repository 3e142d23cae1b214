"""Where the turns of a chat end, and the part before them: templates of many kinds, as the chat goes on."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from tests.engine.support.chats import BLIND, CHATML, GLUED, LLAMA3, REVERSED, decoded, render
from tests.engine.support.turn_templates import (
    ANSWERED_BY_USER,
    DROPS_EMPTY,
    DROPS_THOUGHTS,
    LOOP,
    MOVES_SYSTEM,
    NO_RESULTS,
    PLAIN,
    SORTS_RESULTS,
    SYSTEM,
    answer,
    result,
    user,
)
from vllm_kvevict.engine import metrics
from vllm_kvevict.engine.frontend import boundaries, chat
from vllm_kvevict.engine.frontend.boundaries import find_turns, longest_ascending, messages_behind_turns
from vllm_kvevict.engine.request_options import KEEPS_ALL, Rendered, RequestOptions, facts_of


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers(scope="turns", budget=0.25)


def asked(messages: list[Any]) -> list[int]:
    """The lengths of a chat's beginnings that the assistant has to answer."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def stay(renderer, template: str, messages: list[Any]) -> list[str]:
    """What becomes of the ends in each beginning of a chat, when it goes on by up to two more questions.

    Of each end that the tokens before it stay the same, and it is found again (L), or only until the next question (-).
    """
    prompts = {count: render(renderer, messages[:count], template)[0] for count in asked(messages)}
    stays = []
    for count, prompt in prompts.items():
        ids, ends = prompt["prompt_token_ids"], facts_of(prompt).ends
        assert all(0 < first < second for first, second in pairwise([*ends, len(ids)]))
        more = {later: questions(messages[count:later]) for later in prompts if later > count}
        if not any(more.values()):
            continue
        found = ""
        for end in ends:
            same = {
                later: prompts[later]["prompt_token_ids"][:end] == ids[:end]
                and end in facts_of(prompts[later]).ends
                for later in more
                if more[later] <= 2
            }
            assert all(same[later] for later in same if not more[later]), (count, end)
            found += "L" if all(same.values()) else "-"
        stays.append(found)
    return stays


def questions(messages: list[Any]) -> int:
    return sum(message["role"] == "user" for message in messages)


GROWS = ["L", "LL", "LLL"]
WHILE_LOOPING = ["L" + "-" * rounds for rounds in range(9)]
STAYS = {
    "ChatML": (CHATML, PLAIN, GROWS),
    "Llama 3, which trims": (LLAMA3, PLAIN, GROWS),
    "thoughts, without tools": (DROPS_THOUGHTS, PLAIN, GROWS),
    "instructions that move": (MOVES_SYSTEM, PLAIN, ["", "L", "LL"]),
    "instructions that move, and tools": (
        MOVES_SYSTEM, LOOP, ["", *("-" * rounds for rounds in range(2, 10)), "L" * 9],
    ),
    "tools": (CHATML, LOOP, ["L" * rounds for rounds in range(1, 11)]),
    "tools and thoughts": (DROPS_THOUGHTS, LOOP, [*WHILE_LOOPING, "L" * 10]),
    "tools and a place for thoughts": (DROPS_EMPTY, LOOP, [*WHILE_LOOPING, "L" * 10]),
    "tools that are not shown": (NO_RESULTS, LOOP, [*["L"] * 9, "LL"]),
    "tools that are sorted": (SORTS_RESULTS, LOOP, ["L" * rounds for rounds in range(1, 11)]),
    "answers by the user": (CHATML, ANSWERED_BY_USER, GROWS),
    # With a mark before it the second message of the user is a question, before which thoughts are dropped.
    "answers by the user, and thoughts": (DROPS_THOUGHTS, ANSWERED_BY_USER, ["L", "L", "LLL"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name, renderer):
    template, messages, expected = STAYS[name]
    assert stay(renderer, template, messages) == expected


@pytest.mark.parametrize("template", [CHATML, DROPS_THOUGHTS, MOVES_SYSTEM])
def test_a_request_says_which_ends_are_lasting(template, renderer):
    """Where some are not: in a round of tools, of templates that change what came before."""
    for count in asked(LOOP):
        prompt = render(renderer, LOOP[:count], template)[0]
        options = process(renderer, prompt)
        later = render(renderer, [*LOOP[:count], answer("So it is."), user("And then?")], template)[0]
        ids, goes_on = prompt["prompt_token_ids"], later["prompt_token_ids"]
        lasts = [ids[:end] == goes_on[:end] for end in facts_of(prompt).ends]
        assert [not options.changes_later(end) for end in options.ends or ()] == lasts, count
        assert (options.rendered == Rendered()) == (False not in lasts)


def ends_of(*chat: Any, **kwargs: Any) -> list[int]:
    """Where the turns of a chat end, in tokens."""
    return facts_of(render(*chat, **kwargs)[0]).ends


def ends(renderer, messages: list[Any], template: str = CHATML, **kwargs: Any) -> list[str]:
    """The text between one end and the next of a chat's turns, from the beginning on."""
    prompt, _ = render(renderer, messages, template, **kwargs)
    ids = prompt["prompt_token_ids"]
    return [decoded(renderer, ids[begin:end]) for begin, end in pairwise([0, *facts_of(prompt).ends])]


def test_a_turn_ends_where_an_answer_does(renderer):
    """Before the header of the next message; the last token of what comes before it belongs to the next turn."""
    head = "<|im_start|>"
    system, first, second, third = ends(renderer, [*PLAIN[:-2], user("?")])
    assert system == f"{head}system\nYou know every harbour of Europe.<|im_end|>\n{head}"
    assert first.startswith("user\nWhich port") and first.endswith(f"Rotterdam.<|im_end|>\n{head}")
    assert "And the second?" in second and "Antwerp." in second and "third" not in second
    assert "The third?" in third and "Hamburg." in third


ROLES = {
    "u": [[0]],
    "a": [],
    "s": [],
    "suau": [[1], [3]],
    "uattta": [[0], [2, 3, 4]],
    "uatu": [[0], [2]],
    "uasu": [[0], [2]],
    "asu": [[1], [2]],
    "uau": [[0], [2]],
    "uaau": [[0], [3]],
    "uuau": [[0], [3]],
    "uatatt": [[0], [2], [4, 5]],
}


@pytest.mark.parametrize("roles", ROLES)
def test_messages_behind_turns(roles):
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    assert [list(turn) for turn in messages_behind_turns([names[x] for x in roles])] == ROLES[roles]


@given(st.lists(st.integers(0, 30), unique=True, max_size=9))
def test_one_message_that_moved_costs_no_other(places):
    found = longest_ascending(places)
    assert found == sorted(found) and [x for x in places if x in set(found)] == found
    for mask in range(1 << len(places)):
        some = [x for bit, x in enumerate(places) if mask >> bit & 1]
        assert len(some) <= len(found) or some != sorted(some)


AWKWARD = ["", " ", "\n\n", "\n\nWhy?", "0", "]/INST]", "<|im_end|>\n", "\ue000", "\ue001?", "{{ m }}"]


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, MOVES_SYSTEM, DROPS_THOUGHTS, DROPS_EMPTY, SORTS_RESULTS, GLUED]
)
@settings(max_examples=20, deadline=None)
@given(text=st.sampled_from(AWKWARD) | st.text(max_size=20), at=st.sampled_from([3, 7]))
def test_no_message_changes_the_ends_before_it(template, renderer, text, at):
    """Nor the tokens before these; a message without text has none before it."""
    messages = [SYSTEM, *PLAIN[1:3], result("467 million"), answer("I see."), *PLAIN[3:5], user("And now?")]
    before = render(renderer, messages, template)[0]
    changed = [*messages[:at], {**messages[at], "content": text}, *messages[at + 1 :]]
    prompt = render(renderer, changed, template)[0]
    count = len([turn for turn in messages_behind_turns([m["role"] for m in messages]) if turn[0] < at])
    expected = facts_of(before).ends[: count + bool(text.strip())]
    assert facts_of(prompt).ends[: len(expected)] == expected
    last = expected[-1]
    assert prompt["prompt_token_ids"][:last] == before["prompt_token_ids"][:last]


def test_messages_in_parts(renderer):
    def parts(message, *before):
        return {**message, "content": [*before, {"type": "text", "text": message["content"]}]}

    assert ends(renderer, list(map(parts, PLAIN[:8]))) == ends(renderer, PLAIN[:8])
    by_part = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    empty = {"type": "text", "text": " "}
    messages = [parts(message, empty) for message in PLAIN[:8]]
    assert len(ends(renderer, messages, by_part)) == 4 == len(ends(renderer, messages))
    assert messages[1]["content"] == [empty, {"type": "text", "text": PLAIN[1]["content"]}]


HIDDEN = {
    "escaped": ("{{ m.content | tojson(ensure_ascii=true) if m.role == 'tool' else m.content }}", 2),
    "shown": ("{{ m.content }}", 3),
}


@pytest.mark.parametrize("content, count", HIDDEN.values(), ids=HIDDEN)
def test_a_mark_that_is_hidden_costs_one_end(content, count, renderer):
    messages = [*PLAIN[1:3], result("467 million"), answer("I see."), user("And now?")]
    assert len(ends(renderer, messages, CHATML.replace("{{ m.content }}", content))) == count


def test_without_a_mark_there_is_no_end(renderer, monkeypatch):
    for messages in ([SYSTEM], [answer("Hello.")], [user(" ")], [user("Hello.")]):
        assert ends(renderer, messages) in ([], ["<|im_start|>"])
    assert ends(renderer, PLAIN[:4], BLIND) == []
    assert ends_of(renderer, [user("Hello.")], GLUED) == []
    silent = {"role": "user", "content": [{"type": "text", "text": ""}]}
    assert len(ends(renderer, [*PLAIN[:3], silent, answer("?"), user("Yes?")])) == 2
    monkeypatch.setattr(chat, "MEANINGLESS", tuple("\ue000\ue001"))
    assert len(ends(renderer, PLAIN[:6])) == 2 and len(ends(renderer, [*PLAIN[:5], user("\ue000")])) == 1
    # Nor if it is in the chat and the template does not show it.
    assert len(ends(renderer, [*PLAIN[:5], {**user("?"), "name": "\ue000"}])) == 1


# What cannot be marked: the end before the question.


def test_other_prompts_have_the_end_before_the_question(renderer, renderers, monkeypatch):
    (expected,) = facts_of(render(renderers(scope="prefix"), PLAIN[:6])[0]).ends
    tokens = render(renderer, PLAIN[:6], tokenize=True)[0]
    assert "prompt" not in tokens and facts_of(tokens).ends in ([expected - 1], [expected], [expected + 1])
    refuses_marks = CHATML + "{{ '' if messages[1].content[0] == 'W' else raise_exception('No') }}"
    assert ends_of(renderer, PLAIN[:6], refuses_marks) == [expected]
    refuses_all = refuses_marks.replace("messages[1]", "messages[-1]")
    with pytest.raises(VLLMValidationError, match=r"kv_turns is required .* refuses another question"):
        process(renderer, render(renderer, [SYSTEM, user("Which?")], refuses_all)[0])
    # The tokenizer makes other tokens of the text.
    monkeypatch.setattr(boundaries, "tokens_before", lambda *args: None)
    prompt = render(renderer, PLAIN[:6])[0]
    ids = [*prompt["prompt_token_ids"][:-1], 7]
    assert find_turns(facts_of(prompt), {**prompt, "prompt_token_ids": ids}) == [expected]
    monkeypatch.setattr(type(renderer), "_can_produce_offsets", lambda self: False)
    assert ends_of(renderer, PLAIN[:6]) == [expected]


def test_added_tokens_and_offsets_say_the_same(renderer, monkeypatch):
    by_added_tokens = ends_of(renderer, PLAIN)
    monkeypatch.setattr(boundaries, "tokens_before", lambda *args: None)
    assert ends_of(renderer, PLAIN) == by_added_tokens
    assert len(by_added_tokens) > 2
    assert ends_of(renderer, [user("Hello.")], GLUED) == []


def test_a_chat_that_is_cut_is_refused(renderer):
    cut = renderer.default_chat_tok_params.with_kwargs(truncate_prompt_tokens=20)
    prompt, _ = render(renderer, PLAIN[:6], tok_params=cut)
    sentence = "kv_turns is required with --kv-eviction-config.scope turns: the chat may have been cut"
    with pytest.raises(VLLMValidationError, match=sentence):
        process(renderer, prompt)


CLOCK = "{{ strftime_now('%f') }}"


def test_turns_end_before_a_clock(renderer):
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}" + CLOCK)
    prompt = render(renderer, PLAIN[:6], template)[0]
    assert facts_of(prompt).changes and facts_of(prompt).ends == []
    at_end = CHATML.replace("assistant\n", "assistant\n" + CLOCK)
    assert len(ends_of(renderer, PLAIN[:6], at_end)) == 3


def test_chats_that_change_are_counted(renderer, monkeypatch):
    counted = []
    monkeypatch.setattr(metrics, "count_changing", lambda: counted.append(1))
    for template, count in ((CHATML, 5), (DROPS_THOUGHTS, 2), (DROPS_THOUGHTS, 5)):
        process(renderer, render(renderer, LOOP[:count], template)[0])
    assert len(counted) == 1


def process(renderer, prompt, **fields):
    params = SamplingParams(extra_args=fields or None)
    request = InputProcessor(renderer.config).process_inputs("r", prompt, params, ("generate",))
    return RequestOptions.of(request.sampling_params)


def test_requests_get_their_turns(renderers, monkeypatch):
    """Unless they say themselves where they are evicted; a completion has to."""
    renderer, counted = renderers(scope="turns", budget=0.25, min_turn=16, policies="all"), []
    monkeypatch.setattr(metrics, "count_kept_whole", counted.append)
    prompt = render(renderer, PLAIN[:6])[0]
    assert process(renderer, prompt).ends == tuple(facts_of(prompt).ends)
    for fields, end in (
        ({"kv_turns": [20]}, (20,)),
        ({"kv_prefix_len": 20}, (20,)),
        ({"kv_eviction": "full"}, None),
    ):
        assert process(renderer, prompt, **fields).ends == end
    assert counted == []
    assert process(renderer, render(renderer, [SYSTEM])[0]) == KEEPS_ALL
    changes = render(renderer, PLAIN[:6], CLOCK + CHATML)[0]
    assert process(renderer, changes) == KEEPS_ALL
    assert counted == ["short", "changes"]
    tokens = {"prompt_token_ids": [7] * 100}
    with pytest.raises(
        VLLMValidationError, match=r"scope turns: the server has not .* cannot find the ends of turns"
    ):
        process(renderer, tokens)
    for fields, words in (({"kv_eviction": "take"}, "take"), ({"kv_budget": 40}, "40 tokens")):
        with pytest.raises(VLLMValidationError, match=f"^kv_turns .*{words}"):
            process(renderer, prompt, **fields)


def test_the_words_of_a_repeat_stay_the_same(renderers):
    """They are a part of what cached turns are found by."""
    renderer = renderers(scope="turns", policy="kvzip", budget=0.25)
    for template, messages in ((CHATML, PLAIN), (DROPS_THOUGHTS, LOOP), (MOVES_SYSTEM, PLAIN)):
        rows = [
            process(renderer, render(renderer, messages[:count], template)[0]).rendered.repeat
            for count in asked(messages)[1:]
        ]
        assert len(rows) > 1 and rows[0] and all(each == rows[0] for each in rows), template[:30]


# `keep_first`: where the part before the first user message ends, as templates write it, and what requests get.

TOOLS = "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
TEXT = SYSTEM["content"]


@pytest.fixture(scope="module")
def keeping(renderers):
    """The renderer of a server that keeps the part before the first user message whole."""
    return renderers(scope="turns", budget=0.25, keep_first=True, min_turn=1, min_prompt=1)


def first_part(keeping, messages, template=CHATML, **kwargs) -> str | None:
    """The text that stays whole, None if the request says nothing of it."""
    prompt = render(keeping, messages, template, **kwargs)[0]
    options = process(keeping, prompt)
    whole = options.rendered.whole
    assert not whole or whole in options.ends
    return decoded(keeping, prompt["prompt_token_ids"][:whole]) if whole else None


@pytest.mark.parametrize("template", [CHATML, LLAMA3, DROPS_THOUGHTS, DROPS_EMPTY])
@pytest.mark.parametrize("messages", [PLAIN, LOOP], ids=["plain", "tools"])
def test_instructions_stay_however_the_chat_goes_on(template, messages, keeping):
    assert messages[0] == SYSTEM
    (part,) = {first_part(keeping, messages[:count], template) for count in asked(messages)}
    assert TEXT in part and "port" not in part.replace(TEXT, "")


def test_all_before_the_first_user_message(keeping):
    """Also what the assistant says there, and tools that only the template writes; but no later instructions."""
    greeting = [SYSTEM, answer("Welcome."), {"role": "system", "content": "Be brief."}, user("Which?")]
    later = [answer("None."), {"role": "system", "content": "Be kind."}, user("And now?")]
    part = first_part(keeping, [*greeting, *later])
    assert "Be brief" in part and "Which" not in part
    tool = {"type": "function", "function": {"name": "largest_port", "parameters": {}}}
    part = first_part(keeping, [user("Which?")], TOOLS + CHATML, tools=[tool])
    assert "largest_port" in part and "Which" not in part


def test_where_it_is_not_found(keeping):
    """Instructions that stand elsewhere: nothing, or next to nothing, comes before the first user message."""
    for template in (MOVES_SYSTEM, REVERSED):
        assert TEXT not in (first_part(keeping, PLAIN[:6], template) or "")


def test_servers_that_do_not_keep_it_say_nothing_of_it(renderers, keeping):
    prompt = render(keeping, PLAIN[:6])[0]
    rendered = process(keeping, prompt).rendered
    assert rendered.whole and rendered.lasting is None
    assert process(keeping, prompt, kv_turns=[5]).rendered == Rendered()
    rendered = process(keeping, render(keeping, LOOP[:5], DROPS_THOUGHTS)[0]).rendered
    assert rendered.whole and rendered.lasting is not None
    other = renderers(scope="turns", budget=0.25, min_turn=1, min_prompt=1)
    assert process(other, render(other, PLAIN[:6])[0]).rendered == Rendered()
