"""`keep_first`: where the part before the first user message ends, as templates write it, and what requests get."""

import pytest

from tests.engine.frontend.test_boundaries import CHATML, PLAIN, process
from tests.engine.support.chats import LLAMA3, REVERSED, decoded, render
from tests.engine.support.turn_templates import (
    DROPS_EMPTY,
    DROPS_THOUGHTS,
    LOOP,
    MOVES_SYSTEM,
    SYSTEM,
    answer,
    user,
)
from vllm_kvevict.engine.turns import LASTING, TURNS, WHOLE

TOOLS = "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
TEXT = SYSTEM["content"]


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers(scope="turns", budget=0.25, keep_first=True, min_turn=1, min_prompt=1)


def first_part(renderer, messages, template=CHATML, **kwargs) -> str | None:
    """The text that stays whole, None if the request says nothing of it."""
    prompt = render(renderer, messages, template, **kwargs)[0]
    fields = process(renderer, prompt)
    assert fields.get(WHOLE, fields[TURNS][0]) in fields[TURNS]
    return decoded(renderer, prompt["prompt_token_ids"][: fields[WHOLE]]) if WHOLE in fields else None


@pytest.mark.parametrize("template", [CHATML, LLAMA3, DROPS_THOUGHTS, DROPS_EMPTY])
@pytest.mark.parametrize("messages", [PLAIN, LOOP], ids=["plain", "tools"])
def test_instructions_stay_however_the_chat_goes_on(template, messages, renderer):
    assert messages[0] == SYSTEM
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    parts = {first_part(renderer, messages[:count], template) for count in asked}
    (part,) = parts
    assert TEXT in part and "port" not in part.replace(TEXT, "")


def test_all_before_the_first_user_message(renderer):
    """Also what the assistant says there, and tools that only the template writes; but no later instructions."""
    greeting = [SYSTEM, answer("Welcome."), {"role": "system", "content": "Be brief."}, user("Which?")]
    later = [answer("None."), {"role": "system", "content": "Be kind."}, user("And now?")]
    part = first_part(renderer, [*greeting, *later])
    assert "Be brief" in part and "Which" not in part
    tool = {"type": "function", "function": {"name": "largest_port", "parameters": {}}}
    part = first_part(renderer, [user("Which?")], TOOLS + CHATML, tools=[tool])
    assert "largest_port" in part and "Which" not in part


def test_where_it_is_not_found(renderer):
    """Instructions that stand elsewhere: nothing, or next to nothing, comes before the first user message."""
    for template in (MOVES_SYSTEM, REVERSED):
        assert TEXT not in (first_part(renderer, PLAIN[:6], template) or "")


def test_servers_that_do_not_keep_it_say_nothing_of_it(renderers, renderer):
    prompt = render(renderer, PLAIN[:6])[0]
    assert process(renderer, prompt).keys() == {TURNS, WHOLE}
    assert process(renderer, prompt, **{TURNS: [5]}) == {TURNS: [5]}
    loop = render(renderer, LOOP[:5], DROPS_THOUGHTS)[0]
    assert process(renderer, loop).keys() == {TURNS, WHOLE, LASTING}
    other = renderers(scope="turns", budget=0.25, min_turn=1, min_prompt=1)
    assert process(other, render(other, PLAIN[:6])[0]).keys() == {TURNS}
