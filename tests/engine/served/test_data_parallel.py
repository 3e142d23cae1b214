"""Several engines behind one front-end: each has its own ledger, and none is asked for more than it holds."""

import asyncio
import contextlib

import pytest
from vllm import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.support.quick_starts import forked_processes
from tests.engine.support.running import Ask, evicting_engine, run

ENGINES = 2
# Chunks of 64 tokens bound what a prompt holds, so that an engine can start whose memory not every request fits.
TAKE = {"policy": "take", "budget": 48, "take_chunk": 64, "take_probe": 16}
SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "enable_prefix_caching": False}
ASKS = [Ask(length, "ada-snapkv", 0.3, max_tokens=24) for length in (300, 200, 450, 64)]
TOO_LONG = Ask(3000)
"""A request that keeps all: too much for one engine, not for two of them."""


@contextlib.asynccontextmanager
async def _engines(model, eviction):
    args = AsyncEngineArgs(
        str(model),
        additional_config={"kv_eviction": {**TAKE, "min_prompt": 0, "policies": "all", **eviction}},
        data_parallel_size=ENGINES,
        kv_cache_memory_bytes=1 << 22,
        **SETTINGS,
    )
    with forked_processes():
        llm = AsyncLLM.from_engine_args(args)
    try:
        yield llm
    finally:
        llm.shutdown()


async def _tokens(llm, ask, engine, name):
    prompt, tokens = {"prompt_token_ids": ask.prompt}, []
    async for output in llm.generate(prompt, ask.sampling(False), name, data_parallel_rank=engine):
        tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.engine
def test_every_engine_answers_as_one_alone(models, tmp_path, monkeypatch):
    # A front-end with an engine in its own process cannot have several.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    # Else vLLM 0.33 gives each engine a NUMA node of its own, and this machine may have one.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    model, log = models(), tmp_path / "evictions.jsonl"

    async def ask_all():
        async with _engines(model, {"eviction_log": str(log)}) as llm:
            jobs = [
                _tokens(llm, ask, engine, f"{engine}-{i}")
                for i, ask in enumerate(ASKS)
                for engine in range(ENGINES)
            ]
            answers = await asyncio.gather(*jobs)
            with pytest.raises(VLLMValidationError, match="do not fit the KV cache"):
                await _tokens(llm, TOO_LONG, 0, "too-long")
        return answers

    answers = asyncio.run(ask_all())
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with evicting_engine(model) as llm:
        expected = [answer.tokens for answer in run(llm, ASKS)]
    for engine in range(ENGINES):
        assert answers[engine::ENGINES] == expected
    assert len(log.read_text().splitlines()) == ENGINES * len(ASKS)
