"""take through the engine: what every layer and head stores after every chunk, and what the model then says."""

import dataclasses
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.engine.support.chunked import ChunkedModel
from tests.engine.support.masked import CLOSE, check_logits
from tests.engine.support.running import Answer, Ask, evicting_engine, num_preemptions, run
from vllm_kvevict.policies import EvictionConfig

LAYERS = 4
SMALL = {"max_num_seqs": 16, "max_model_len": 1024}


def server(**params: Any) -> dict[str, Any]:
    """Eviction options of a server whose own policy is take, with chunks that tests can afford."""
    return {"policy": "take", "budget": 48, "take_chunk": 64, "take_probe": 16, "take_alpha": 0.3, **params}


def config_of(ask: Ask, options: dict[str, Any]) -> EvictionConfig:
    params = {name: value for name, value in options.items() if name not in ("policy", "budget")}
    return dataclasses.replace(ask, budget=ask.budget or options["budget"]).config(**params)


def check(model, options: dict[str, Any], ask: Ask, answer: Answer) -> None:
    """The same sets after every chunk, and the same logits, as the plain model has."""
    plain = ChunkedModel(model, config_of(ask, options), ask.length)
    logits = plain.logits(ask.prompt, answer.tokens, answer.kept)
    assert answer.kept == plain.kept
    torch.testing.assert_close(answer.logits, logits, **CLOSE)


# At most a chunk, a chunk and a token, exact multiples, a last chunk that must be moved, many chunks.
LENGTHS = (49, 63, 64, 65, 79, 80, 81, 128, 129, 200, 333)


@pytest.mark.engine
@pytest.mark.parametrize(
    "params",
    [
        {"take_warmup_layers": 2, "take_warmup_budget": 90},
        {"take_probe": 64, "budget": 70, "take_warmup_layers": 1},
        {"take_warmup_layers": 0},
        {"take_warmup_layers": LAYERS, "take_warmup_budget": 60, "budget": 0.2},
        {"take_guide": "chunk"},
    ],
    ids=["half", "probe as long as a chunk", "no warm-up", "all layers warm up", "no probe"],
)
def test_equals_the_plain_model(models, params) -> None:
    """In one batch with other policies, decodes, and prompts in the middle of a chunk."""
    model = models("llama", heads=4, kv_heads=2, layers=LAYERS)
    options = server(**params)
    asks = [Ask(length, "take", seed=i) for i, length in enumerate(LENGTHS)]
    asks += [Ask(250, "take", 100.0, seed=1), Ask(250, "take", 0.5, seed=2)]
    others = [Ask(300, "ada-snapkv", 0.2), Ask(120, "full", max_tokens=40), Ask(90, "streaming-llm", 0.5)]
    with evicting_engine(model, eviction=options, **SMALL, max_num_batched_tokens=96) as llm:
        answers = run(llm, asks + others, logits=True)
    for ask, answer in zip(asks, answers, strict=False):
        if ask.length > config_of(ask, options).budget_for(ask.length):
            check(model, options, ask, answer)
        else:
            assert not answer.kept
    for ask, answer in zip(others, answers[len(asks) :], strict=True):
        check_logits(model, ask, answer)


@pytest.mark.engine
def test_preempted_in_the_middle_of_a_prompt(models) -> None:
    """Prompts that are thrown out between two chunks begin again, and end as they would have."""
    model = models("llama", heads=8, kv_heads=4, layers=LAYERS)
    asks = [Ask(330, "take", seed=i, max_tokens=120) for i in range(6)]
    options = {**server(), "decode_reserve": 8}
    settings = {**SMALL, "max_num_batched_tokens": 64, "eviction": options, "max_model_len": 512}
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, asks)
    with evicting_engine(model, **settings, num_gpu_blocks_override=3) as llm:
        answers = run(llm, asks)
        assert num_preemptions(llm) > 0
    chunks = len(expected[0].kept)
    assert any(len(answer.kept) > chunks for answer in answers)
    for one, other in zip(expected, answers, strict=True):
        assert other.kept[-chunks:] == one.kept
        assert other.tokens == one.tokens


@pytest.mark.engine
def test_a_prompt_that_the_pool_could_never_hold_whole(models) -> None:
    """32k and 128k tokens in the memory of 6k: vLLM starts, the peak stays within the bound, enough entries stay."""
    longest = 131_072 + 64
    model = models("llama", layers=2, hidden=64, heads=2, max_len=longest)
    options = {"policy": "take", "budget": 512, "take_chunk": 2048, "take_warmup_budget": 2048}
    settings = {"max_model_len": longest, "max_num_batched_tokens": 2048, "eviction": options}
    with evicting_engine(model, **settings, num_gpu_blocks_override=6144 // 128) as llm:
        asks = [Ask(length, "take", max_tokens=8) for length in (32_000, 131_072)]
        answers = run(llm, asks)
        for ask, answer in zip(asks, answers, strict=True):
            assert len(answer.tokens) == 8 and len(answer.kept) == -(-ask.length // 2048)
            assert {len(head) for layer in answer.kept[-1].values() for head in layer} == {512}
        with pytest.raises(
            VLLMValidationError,
            match=r"32000 tokens do not fit the KV cache: the longest .*fits with kv_eviction=take",
        ):
            run(llm, [dataclasses.replace(asks[0], policy="full")])
        # An answer that fills the memory ends; its last token is not stored.
        long = run(llm, [Ask(6000, "full", max_tokens=4000)])[0]
        assert 6000 + len(long.tokens) - 1 == 6144
