"""What the model is asked when it repeats a prefix: in many templates, in plain text, and for whom it is noted."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.renderers.registry import renderer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from tests.engine.support.chats import (
    BLIND,
    CASES,
    CHATML,
    DOCUMENT,
    PICKY,
    PLAIN,
    QUESTION,
    REVERSED,
    SYSTEM,
    SYSTEM_LAST,
    TURN,
    ask,
    decoded,
    prefix_len_of,
    render,
)
from vllm_kvevict.engine.frontend import requests
from vllm_kvevict.engine.frontend.repeats import NOT_THINKING, REPEAT_ALL, REPEAT_PART, repeat_prompts
from vllm_kvevict.engine.request_options import RENDERED, RequestOptions
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS, RepeatPrompts


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers(policy="kvzip", scope="prefix")


# In the words of a template.


def check_chat(renderer, messages, template, **kwargs):
    """What stands behind the prefix are the tokens of a chat that asks to repeat it, whatever this one asks."""
    prompt, prefix = render(renderer, [*messages, ask()], template, **kwargs)
    found, settings = repeat_prompts(renderer, prompt), {**kwargs, **NOT_THINKING}
    whole, same = render(renderer, [*messages, ask(REPEAT_ALL)], template, **settings)
    assert same == prefix
    assert found.first == tuple(whole["prompt_token_ids"][prefix_len_of(whole) :])
    hint = "<hint of the chunk>"
    part, _ = render(renderer, [*messages, ask(REPEAT_PART + hint)], template, **settings)
    text = hint.join(decoded(renderer, ids) for ids in (found.before, found.after))
    assert prefix + text == part["prompt"] and QUESTION not in text
    assert found.after == () or found.after == found.first[-len(found.after) :]
    return text


@pytest.mark.parametrize("template, before, prefix", CASES.values(), ids=CASES)
def test_templates(template, before, prefix, renderer):
    check_chat(renderer, before, template)


THINKS = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
FORCED = "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}"
ANSWER = "<|im_start|>assistant\n"


@pytest.mark.parametrize("switch, tail", [(THINKS, "<think>\n\n</think>\n\n"), (FORCED, "</think>")])
@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True, "thinking": True}])
def test_the_assistant_repeats_at_once(switch, tail, thinking, renderer):
    template = CHATML.replace("assistant\n{% endif %}", f"assistant\n{switch}{{% endif %}}")
    assert template != CHATML
    assert check_chat(renderer, TURN, template, **thinking).endswith(ANSWER + tail)


def test_a_switch_that_changes_the_prefix_is_left_as_it_is(renderer):
    """Some templates say in the instructions whether to think."""
    template = "{% if enable_thinking is defined %}/no_think\n{% endif %}" + CHATML
    prompt, _ = render(renderer, [*TURN, ask()], template)
    plain, _ = render(renderer, [*TURN, ask()], CHATML)
    assert repeat_prompts(renderer, prompt) == repeat_prompts(renderer, plain)
    assert decoded(renderer, repeat_prompts(renderer, prompt).first).endswith(ANSWER)


def test_what_comes_after_the_question_is_left_out(renderer):
    expected = repeat_prompts(renderer, render(renderer, [*TURN, ask()])[0])
    looked = [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": DOCUMENT * 20}]
    assert repeat_prompts(renderer, render(renderer, [*TURN, ask(), *looked])[0]) == expected
    begun = [*TURN, ask(), {"role": "assistant", "content": "It is"}]
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    assert repeat_prompts(renderer, render(renderer, begun, **settings)[0]) == expected


def test_a_template_that_refuses_short_questions(renderer):
    assert check_chat(renderer, SYSTEM, PICKY).startswith(".")


def test_tools_and_parts_belong_to_the_prefix(renderer):
    tools = [{"type": "function", "function": {"name": "look"}}]
    check_chat(renderer, TURN, "{{ tools }}" + CHATML, tools=tools)
    parts = [{"role": "user", "content": [{"type": "text", "text": DOCUMENT}]}]
    check_chat(renderer, parts, CHATML)


@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_templates_that_give_tokens(template, renderer):
    prompt, _ = render(renderer, [*TURN, ask()], template, tokenize=True)
    found = repeat_prompts(renderer, prompt)
    whole, _ = render(renderer, [*TURN, ask(REPEAT_ALL)], template, tokenize=True)
    assert found.first == tuple(whole["prompt_token_ids"][prefix_len_of(prompt) :])
    text = "hint".join(decoded(renderer, ids) for ids in (found.before, found.after))
    part, _ = render(renderer, [*TURN, ask(REPEAT_PART + "hint")], template)
    # Spaces at the end may belong to the hint's first token.
    assert part["prompt"].endswith(text) or part["prompt"].replace(" hint", "hint").endswith(text)
    assert "exactly, starting with" in text and found != plain_text(renderer)


# Behind a chat that is repeated with its question.

REWRITING = {"the question first", "instructions at the end"}
"""Templates that write what came before differently once a turn follows."""


@pytest.mark.parametrize(
    "template, before", [pytest.param(*CASES[name][:2], id=name) for name in CASES if name not in REWRITING]
)
def test_a_chat_with_its_question_goes_on(template, before, renderer):
    """The assistant has said nothing, and the user's next turn asks to repeat."""
    chat = [*before, ask()]
    prompt, _ = render(renderer, chat, template)
    found = repeat_prompts(renderer, prompt, with_question=True).behind(prompt["prompt_token_ids"])

    def going_on(question):
        turns = [*chat, {"role": "assistant", "content": ""}, ask(question)]
        text = render(renderer, turns, template, **NOT_THINKING)[0]["prompt"]
        # A reply may begin with a space, which one that is still to come does not have yet.
        return text.replace("ASSISTANT: \n", "ASSISTANT:\n")

    assert prompt["prompt"] + decoded(renderer, found.first) == going_on(REPEAT_ALL)
    hint = "<hint of the chunk>"
    part = hint.join(decoded(renderer, ids) for ids in (found.before, found.after))
    assert prompt["prompt"] + part == going_on(REPEAT_PART + hint)


def test_what_a_template_writes_into_the_last_turn_is_written_again(renderer):
    prompt, _ = render(renderer, [*SYSTEM, ask()], SYSTEM_LAST)
    found = repeat_prompts(renderer, prompt, with_question=True).behind(prompt["prompt_token_ids"])
    assert decoded(renderer, found.first) == f"</s>[INST] {DOCUMENT}\n\n{REPEAT_ALL} [/INST]"


def test_a_reply_that_was_begun_ends(renderer):
    begun = [*TURN, ask(), {"role": "assistant", "content": "It is"}]
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    prompt, _ = render(renderer, begun, **settings)
    found = repeat_prompts(renderer, prompt, with_question=True).behind(prompt["prompt_token_ids"])
    whole, _ = render(renderer, [*begun, ask(REPEAT_ALL)])
    assert prompt["prompt"] + decoded(renderer, found.first) == whole["prompt"]


def test_where_a_chat_cannot_go_on_it_is_plain_text(renderer):
    for template in (REVERSED, BLIND, PICKY):
        prompt, _ = render(renderer, [*SYSTEM, ask()], template)
        assert repeat_prompts(renderer, prompt, with_question=True) == plain_text(renderer)


# In plain text.


def plain_text(renderer):
    """What prompts get that are no chats."""
    return repeat_prompts(renderer, {"prompt_token_ids": [7] * 100})


def test_plain_text(renderer):
    found = plain_text(renderer)
    texts = [decoded(renderer, ids) for ids in (found.first, found.before, found.after)]
    assert texts == [f"\n\n{REPEAT_ALL}\n", f"\n\n{REPEAT_PART}", "\n"]
    assert repeat_prompts(renderer, "a text") == found
    special = set(renderer.get_tokenizer().all_special_ids)
    assert not special & {*found.first, *found.before, *found.after}


def test_what_cannot_be_told_becomes_plain_text(renderer):
    expected = plain_text(renderer)

    def found(messages, *args, **kwargs):
        return repeat_prompts(renderer, render(renderer, messages, *args, **kwargs)[0])

    assert found([*TURN, ask()]) != expected
    assert found([*SYSTEM, ask()], BLIND) == expected  # the question is not in the prompt
    closed = (
        "{% if messages[-1].content[-1] != '?' %}{{ raise_exception('no question') }}{% endif %}" + CHATML
    )
    assert found([*SYSTEM, ask()], closed) == expected  # another question is refused
    assert found([*SYSTEM, ask()], CHATML.replace("m.content", "m.content ~ m.content")) == expected
    assert found(SYSTEM) == expected  # nobody asks
    cut = renderer.default_chat_tok_params.with_kwargs(truncate_prompt_tokens=20, truncation_side="left")
    assert found([*TURN, ask()], CHATML, cut) == expected


def test_long_templates_become_plain_text(renderer):
    def found(words):
        template = CHATML.replace("<|im_end|>", "<|im_end|>" + "x\n" * words)
        return repeat_prompts(renderer, render(renderer, [ask()], template)[0])

    short, expected = found(1), plain_text(renderer)
    room = MOST_EXTRA_ROWS - short.overhead
    assert short != expected and found(1 + room // 2).overhead > short.overhead
    fitting = [words for words in range(1, 300, 10) if found(words) != expected]
    assert fitting == list(range(1, fitting[-1] + 1, 10)) and len(fitting) < 30
    assert MOST_EXTRA_ROWS - 30 < found(fitting[-1]).overhead <= MOST_EXTRA_ROWS


def test_without_a_tokenizer_nothing_stands_there(models):
    args = EngineArgs(str(models("llama")), skip_tokenizer_init=True, kv_eviction="kvzip", dtype="float32")
    bare = renderer_from_config(args.create_engine_config())
    assert plain_text(bare) == RepeatPrompts((), (), ())
    bare.shutdown()


def test_what_a_prefix_ends_with_is_not_asked_again():
    """Some prefixes end before the header of the question's turn, some behind its first tokens."""
    prompts = RepeatPrompts((5, 6, 1, 2), (5, 6, 3), (4,))
    assert prompts.behind([9, 9]) is prompts
    assert prompts.behind([9, 5]) == RepeatPrompts((6, 1, 2), (6, 3), (4,))
    assert prompts.behind([5, 6]) == RepeatPrompts((1, 2), (3,), (4,))
    assert prompts.behind([6]) is prompts and prompts.behind([5, 6, 1]) is prompts
    assert RepeatPrompts().behind([1]) == RepeatPrompts()


# For whom it is noted.


def process(renderer, prompt, **fields):
    """The fields with which a request reaches the scheduler."""
    processor = InputProcessor(renderer.config, renderer)
    params = SamplingParams(max_tokens=4, extra_args=fields or None)
    request = processor.process_inputs("r", prompt, params, ("generate",))
    assert params.extra_args == (fields or None)
    return RequestOptions.of(request.sampling_params)


@pytest.mark.parametrize(("scope", "lookahead"), [("prompt", 0), ("prompt", 2), ("prefix", 0)])
@pytest.mark.parametrize("server", ["kvzip", "snapkv"])
def test_requests_of_such_a_policy_have_them(server, scope, lookahead, renderers):
    renderer = renderers(policy=server, scope=scope, policies="all", lookahead=lookahead)
    prompt, _ = render(renderer, [*TURN, ask()])
    behind_prefix, behind_reply = (
        repeat_prompts(renderer, prompt, with_question) for with_question in (False, True)
    )
    assert behind_prefix != behind_reply != plain_text(renderer) != behind_prefix
    named = {} if server == "kvzip" else {"kv_eviction": "kvzip"}
    for fields in ({}, {"kv_prefix_len": 12}, {"kv_prefix_len": 12.0}):
        found = process(renderer, prompt, **named, **fields)
        assert found.rendered.repeat == (behind_prefix if fields or scope == "prefix" else behind_reply)
        assert not fields or found.ends == (12,)
    tokens = {"prompt_token_ids": [7] * 100}
    assert process(renderer, tokens, **named, kv_prefix_len=50).rendered.repeat == plain_text(renderer)


def test_others_have_none(renderers):
    short, _ = render(renderers(policy="kvzip", scope="prefix"), [ask()])
    length = len(short["prompt_token_ids"])
    renderer = renderers(policy="kvzip", scope="prefix", min_prompt=length)
    prompt, _ = render(renderer, [*TURN, ask()])
    assert process(renderer, prompt).rendered.repeat
    for fields in (
        {"kv_eviction": "full"},
        {"kv_eviction": "snapkv"},
        {"kv_budget": 1.0},
        {"kv_prefix_len": 5},
    ):
        assert process(renderer, prompt, **fields).rendered.repeat is None
    # That one has nothing before its question, and its prefix would be too short.
    assert process(renderer, short).rendered.repeat is None
    assert process(renderer, short, kv_prefix_len=length - 1).rendered.repeat is None
    assert process(renderer, short, kv_prefix_len=length).rendered.repeat


WRITTEN = "^kv_rendered must be what a render route wrote: "


def test_rendered_requests_bring_their_own(renderers):
    """They are not found once more, and fields of a client are those of a chat only if they look like it."""
    renderer = renderers(policy="kvzip", policies="all")
    tokens = {"prompt_token_ids": [7] * 100}
    for first in ([1], [], [1] * MOST_EXTRA_ROWS):
        found = process(renderer, tokens, kv_rendered={"repeat": {"first": first, "after": [2]}})
        assert found.rendered.repeat == RepeatPrompts(tuple(first), (), (2,))
    vocab = renderer.config.model_config.get_vocab_size()
    ids = [1, "x", [True], [-1], [1.0], ["1"], [vocab], [1 << 40], [1] * (MOST_EXTRA_ROWS + 1)]
    wrong = [{"repeat": {"first": first}} for first in ids]
    wrong += [{"repeat": {"before": [1] * 64, "after": [1] * 60}}, {"repeat": [[1], [2], [3]]}]
    wrong += [
        [1],
        "x",
        None,
        {"words": 1},
        {"lasting": -1},
        {"whole": True},
        {"whole": 1.5},
        {"lasting": 1 << 41},
    ]
    for rendered in wrong:
        for policy in ("kvzip", "snapkv", "full"):
            with pytest.raises(VLLMValidationError, match=WRITTEN) as error:
                process(renderer, tokens, kv_eviction=policy, kv_rendered=rendered)
            assert error.value.parameter == RENDERED
        with pytest.raises(VLLMValidationError, match=WRITTEN):
            engine = SimpleNamespace(vllm_config=renderer.config, renderer=renderer)
            requests._check_generate(engine, tokens, SamplingParams(extra_args={RENDERED: rendered}))


def test_what_leaves_no_room_for_a_repeat_is_refused(renderers):
    """At least 64 tokens, what is before them and one more must fit behind what is evicted."""
    renderer = renderers(policy="kvzip")
    longest = renderer.config.model_config.max_model_len
    most = longest - 64 - MOST_EXTRA_ROWS - 1
    assert process(renderer, {"prompt_token_ids": [7] * most})
    prompt = {"prompt_token_ids": [7] * (most + 1)}
    sentence = (
        f"^kv_eviction kvzip repeats .* with --max-model-len {longest} it can evict at most {most} tokens"
    )
    with pytest.raises(VLLMValidationError, match=sentence) as error:
        process(renderer, prompt)
    assert error.value.parameter == "prompt"
    assert process(renderer, prompt, kv_prefix_len=most)


def test_a_server_renders_in_vllms_threads(renderer, monkeypatch):
    """It checks requests in its event loop, where nothing is rendered once more."""
    threads, make = [], repeat_prompts

    def watched(*args, **kwargs):
        threads.append(threading.current_thread())
        return make(*args, **kwargs)

    monkeypatch.setattr(requests, "repeat_prompts", watched)
    engine = SimpleNamespace(vllm_config=renderer.config, renderer=renderer, errored=True)
    prompt, _ = render(renderer, [*TURN, ask()])
    for fields, times in ({}, 1), ({"kv_eviction": "snapkv"}, 0):
        threads.clear()
        params = SamplingParams(extra_args=fields)
        requests._check_generate(engine, prompt, params)
        with pytest.raises(EngineDeadError):
            asyncio.run(AsyncLLM.add_request(engine, "r", prompt, params))
        request = InputProcessor(renderer.config, renderer).process_inputs("r", prompt, params, ("generate",))
        repeat = RequestOptions.of(request.sampling_params).rendered.repeat
        assert repeat == (make(renderer, prompt) if times else None)
        assert len(threads) == times and threading.current_thread() not in threads
