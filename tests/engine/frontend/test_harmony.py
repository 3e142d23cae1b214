"""Chats of gpt-oss models, which vLLM renders without a template: where their question begins."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers.online_renderer import OnlineRenderer

from tests.engine.support.chats import DOCUMENT, SYSTEM, TURN, ask, byte_renderers, prefix_len_of
from vllm_kvevict.engine.frontend import harmony
from vllm_kvevict.engine.frontend.repeats import REPEAT_ALL, repeat_prompts
from vllm_kvevict.engine.request_options import facts_of

QUESTIONS = ("Which port is the largest?", "\ue000\ue001?", "q", "7", "", " what?")


@pytest.fixture(scope="module")
def encoding():
    return harmony_utils.get_encoding()


@pytest.fixture(scope="module")
def render(tmp_path_factory, encoding):
    """A server's renderer of such chats."""
    harmony.install()
    with byte_renderers(tmp_path_factory.mktemp("models") / "bytes") as get:

        def make(**options):
            renderer = get(**{"scope": "prefix", **options})
            online = OnlineRenderer(
                renderer.model_config,
                renderer,
                request_logger=None,
                chat_template=None,
                chat_template_content_format="auto",
            )
            online.use_harmony = True
            return online

        yield make


def chat(online, messages):
    _, (prompt,) = online._make_request_with_harmony(ChatCompletionRequest(messages=messages), False)
    return prompt


def responses(online, messages):
    result = online._render_responses_with_harmony(
        ResponsesRequest(input=messages),
        previous_messages=None,
        previous_response_outputs=None,
        tool_server=None,
    )
    return result.engine_input


@pytest.mark.parametrize("endpoint", [chat, responses])
@pytest.mark.parametrize("before", [SYSTEM, TURN, [*SYSTEM, *TURN]])
def test_a_prefix_ends_before_the_question(endpoint, before, render, encoding):
    online, prefixes = render(), set()
    for question in QUESTIONS:
        prompt = endpoint(online, [*before, ask(question)])
        ids, count = prompt["prompt_token_ids"], prefix_len_of(prompt)
        text = encoding.decode(ids[:count])
        header = encoding.decode(ids).rindex("<|start|>user")
        assert DOCUMENT in text and header - 1 <= len(text) <= header + len("<|start|>user<|message|>")
        prefixes.add(text)
    assert len(prefixes) == 1


def test_turns_end_before_the_question_only(render):
    for endpoint in (chat, responses):
        prompt = endpoint(render(), [*TURN, ask()])
        in_turns = endpoint(render(scope="turns", budget=0.25), [*TURN, ask()])
        assert facts_of(in_turns).ends == facts_of(prompt).ends


def test_a_prefix_is_repeated_in_harmonys_words(render, encoding):
    prompt = chat(render(policy="kvzip"), [*TURN, ask()])
    whole = chat(render(), [*TURN, ask(REPEAT_ALL)])["prompt_token_ids"]
    found = repeat_prompts(render().renderer, prompt)
    assert found.first == tuple(whole[prefix_len_of(prompt) :]) and REPEAT_ALL in encoding.decode(found.first)
    goes_on = repeat_prompts(render().renderer, prompt, with_question=True)
    assert REPEAT_ALL in encoding.decode(goes_on.first)
