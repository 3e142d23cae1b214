"""A request is read once and planned twice, in the front-end and in the scheduler, on every route."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.support.chats import TURN, ask, render
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.frontend import requests
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.engine.scheduler.requests import Requests

TOKENS = {"type": "token", "prompt_token_ids": [7] * 100}
EMBEDS = {"type": "embeds", "prompt_embeds": torch.ones(100, 64)}
CHAT = [*TURN, ask()]
TURNS = {"scope": "turns", "budget": 0.25, "min_turn": 16}
ROUTES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "completion": ({}, TOKENS, {}),
    "completion, a policy and a budget": ({}, TOKENS, {"kv_eviction": "h2o", "kv_budget": 0.5}),
    "completion, a prefix": ({"scope": "prefix"}, TOKENS, {"kv_prefix_len": 50}),
    "completion, turns": ({"policy": "kvzip"}, TOKENS, {"kv_turns": [20, 60]}),
    "completion, an answer's budget": ({"decode_budget": 40}, TOKENS, {"kv_decode_budget": 30, "kv_answer_from": 80}),
    "completion, a lookahead": ({"lookahead": 2}, TOKENS, {"kv_lookahead": 1}),
    "completion, an answer within the lookahead: whole": ({"lookahead": 8}, TOKENS, {}),
    "embeddings": ({}, EMBEDS, {"kv_prefix_len": 50}),
    "chat": ({}, CHAT, {}),
    "chat, repeated": ({"policy": "kvzip"}, CHAT, {}),
    "chat, a prefix": ({"policy": "kvzip", "scope": "prefix"}, CHAT, {}),
    "chat, turns": (TURNS, CHAT, {}),
    "chat, turns and answers": ({**TURNS, "policy": "kvzip", "decode_budget": 40}, CHAT, {"kv_params": "sinks=2"}),
    "chat, nothing before its question: whole": ({"scope": "prefix"}, [ask()], {"kv_params": "window=8"}),
    "chat, kept whole": ({"min_prompt": 10_000}, CHAT, {}),
}  # fmt: skip
"""Options of a server, what it is sent, and the request's fields."""


@pytest.fixture
def plans() -> Iterator[mock.Mock]:
    """Counts the plans that are made."""
    with mock.patch.object(RequestOptions, "plan", autospec=True, side_effect=RequestOptions.plan) as plans:
        yield plans


def through_a_server(renderer: Any, prompt: Any, params: SamplingParams) -> EngineCoreRequest:
    """What the engine core gets of a request that a server is sent."""
    engine = SimpleNamespace(vllm_config=renderer.config, renderer=renderer, errored=True)
    requests._check_generate(engine, prompt, params)
    with pytest.raises(EngineDeadError):
        asyncio.run(AsyncLLM.add_request(engine, "r", prompt, params))
    sent = InputProcessor(renderer.config, renderer).process_inputs("r", prompt, params, ("generate",))
    return MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rendered", [False, True])
def test_two_plans(route, rendered, renderers, plans):
    """One more where a route renders, which changes nothing else."""
    options, prompt, fields = ROUTES[route]
    renderer = renderers(**{"policies": "all", **options})
    prompt = dict(prompt) if isinstance(prompt, dict) else render(renderer, prompt)[0]
    given = {**fields, "mine": 1}
    params = SamplingParams(max_tokens=4, extra_args=given)
    arrived = through_a_server(renderer, prompt, params)
    if rendered and "prompt_token_ids" in prompt:
        fields = requests.passed_on_fields(renderer.config, renderer, prompt, params)
        assert plans.call_count == 2
        plans.reset_mock()
        tokens = {"type": "token", "prompt_token_ids": prompt["prompt_token_ids"]}
        again = through_a_server(renderer, tokens, SamplingParams(max_tokens=4, extra_args=fields))
        assert RequestOptions.of(again.sampling_params) == RequestOptions.of(arrived.sampling_params)
    assert plans.call_count == 1 and arrived.sampling_params.extra_args.keys() == {"kv_resolved", "mine"}
    known = Requests(require_options(renderer.config), None, lambda request, plan: {}, None, 1)
    request = Request.from_engine_core_request(arrived, None)
    for _ in range(2):
        known.keys(request)
        known.plan(request)
    assert plans.call_count == 2 and (known.plan(request).prompt is None) == ("whole" in route)
    assert params.extra_args == given


def test_another_request_with_the_same_prompt_is_read(renderers, plans):
    """Whoever changes what was checked is read again."""
    renderer, prompt, params = renderers(policies="all"), dict(TOKENS), SamplingParams(max_tokens=4)
    engine = SimpleNamespace(vllm_config=renderer.config, renderer=renderer)
    processor = InputProcessor(renderer.config, renderer)
    requests._check_generate(engine, prompt, SamplingParams(max_tokens=4, extra_args={"kv_eviction": "full"}))
    for policy in ("snapkv", "h2o"):
        params.extra_args = {"kv_eviction": policy}
        request = processor.process_inputs("r", prompt, params, ("generate",))
        assert RequestOptions.of(request.sampling_params).config.policy == policy
    assert plans.call_count == 3
