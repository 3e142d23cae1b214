"""What vLLM's start-up check and single requests are told of the KV memory; no engine is started."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import ParallelConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm_kvevict.engine  # noqa: F401
from vllm_kvevict.engine import memory
from vllm_kvevict.engine.config import KVEvictionError, options_of
from vllm_kvevict.engine.frontend.requests import _check_generate
from vllm_kvevict.engine.memory import bounds_of, check_fits, engines_of_front_end, longest_step
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.engine.worker import worker
from vllm_kvevict.kernels.layout import Field
from vllm_kvevict.schedules.repeat_prompts import MOST_EXTRA_ROWS

TAKE = {"take_chunk": 1024, "take_probe": 32, "take_warmup_budget": 1024}


def configure(models, *, blocks: int = 0, **settings: Any):
    """The configuration of a server of a model with 4 layers and 2 KV heads. Blocks have 128 tokens; their number vLLM
    finds out later."""
    path = models("llama", max_len=1 << 16)
    args = {"max_model_len": 1 << 16, "kv_budget": 512, "dtype": "float32", "block_size": 128, **settings}
    vllm_config = EngineArgs(model=str(path), **args).create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = blocks
    return vllm_config


def check(vllm_config, prompt: int, min_tokens: int = 0, **fields: Any) -> None:
    options = options_of(vllm_config)
    check_fits(vllm_config, options, plan_for(options, prompt, fields), prompt, min_tokens)


def check_limit(vllm_config, prompt: int, answer: int, **fields: Any) -> None:
    """So many tokens of an answer can be asked for, and not one more."""
    check(vllm_config, prompt, answer, **fields)
    with pytest.raises(KVEvictionError, match=f"only sure to hold {answer} tokens of an answer") as error:
        check(vllm_config, prompt, answer + 1, **fields)
    assert error.value.field_name == "min_tokens"


def needed(vllm_config) -> int:
    """Tokens of full KV in the memory that vLLM asks for."""
    plain = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = BoundedAttentionSpec.of(plain)
    assert spec.page_size_bytes == plain.page_size_bytes
    return spec.max_memory_usage_bytes(vllm_config) * 128 // plain.page_size_bytes


def test_memory_that_vllm_asks_for(models) -> None:
    whole = 1 << 16
    assert needed(configure(models, kv_eviction="snapkv", max_num_batched_tokens=2048)) == whole
    assert needed(configure(models, kv_eviction="full", max_num_batched_tokens=2048)) == whole
    # Half of the layers hold 1024 + 1024 + 32 entries, the others 512 + 1024 + 32.
    bounded = configure(models, kv_eviction="take", kv_eviction_config=TAKE, max_num_batched_tokens=2048)
    assert needed(bounded) == (2080 + 1568) // 2
    # One of four layers is whole, three hold 512.
    at_once = configure(models, kv_eviction="snapkv", max_num_batched_tokens=whole)
    assert needed(at_once) == (whole + 3 * 512) // 4


def test_a_lookahead_takes_memory_for_the_longest_prompt_whole(models) -> None:
    """And no more: who comes so close to the end is never evicted."""
    at_once = {"kv_eviction": "snapkv", "max_num_batched_tokens": 1 << 16}
    ahead = configure(models, kv_eviction_config={"lookahead": 32}, **at_once)
    assert needed(ahead) == 1 << 16
    enough = memory.bytes_for(ahead, [plan_for(options_of(ahead), 1 << 16, most_output=1)], 1 << 16)
    memory.check_holds_longest(ahead, enough)
    says = f"lookahead 32 keeps .* {1 << 16} tokens needs {-(-enough >> 20)} MiB .*lookahead 0$"
    with pytest.raises(KVEvictionError, match=says):
        memory.check_holds_longest(ahead, enough - 1)
    memory.check_holds_longest(configure(models, **at_once), 0)


def test_workers_have_room_for_a_probe(models) -> None:
    for settings, probe in (({"kv_eviction": "snapkv"}, 32), ({"kv_eviction": "take"}, 32)):
        sizes = configure(models, **settings, max_num_batched_tokens=2048, max_num_seqs=8).scheduler_config
        assert (sizes.max_num_batched_tokens, sizes.max_num_scheduled_tokens) == (2048 + probe, 2048)
        assert (sizes.max_num_seqs, sizes.max_num_active_seqs) == (9, 8)
        assert longest_step(sizes) == 2048
    config = {"take_probe": 100}
    sizes = configure(models, kv_eviction="take", kv_eviction_config=config).scheduler_config
    assert sizes.max_num_batched_tokens == sizes.max_num_scheduled_tokens + 100


def test_a_huge_chunk_to_repeat_takes_no_more_room_than_a_request_can_use(models) -> None:
    for chunk, rows in (512, 512 + MOST_EXTRA_ROWS), (10**9, 1 << 16):
        vllm_config = configure(models, kv_eviction="kvzip", kv_eviction_config={"kvzip_chunk": chunk})
        sizes = vllm_config.scheduler_config
        assert sizes.max_num_batched_tokens == sizes.max_num_scheduled_tokens + rows


@pytest.mark.parametrize("stages", [1, 2])
def test_prompts_that_fit_and_those_that_do_not(models, stages: int) -> None:
    """6144 tokens of memory under a context of 65,536."""
    vllm_config = configure(
        models,
        blocks=48,
        kv_eviction="take",
        kv_eviction_config=TAKE,
        max_num_batched_tokens=2048,
        pipeline_parallel_size=stages,
    )
    assert [room.pages for room in bounds_of(vllm_config).ranks] == [48 * 4 * 8 // stages] * stages
    # What is kept grows with the answer, whose last token is not stored.
    check_limit(vllm_config, 50_000, 6144 - 512 + 1)
    check_limit(vllm_config, 200, 6144 - 200 + 1)
    check_limit(vllm_config, 5000, 1144 + 1, kv_eviction="full")
    check_limit(vllm_config, 5000, 6144 - 512 + 1, kv_eviction="snapkv")
    check_limit(vllm_config, 5000, 6144 - 512 - 1000 + 1, kv_eviction="snapkv", kv_prefix_len=4000)
    # Heads that compete may end anywhere in a page, all but one of them at its first entry.
    check_limit(vllm_config, 5000, 6144 - 512 + 1 - 16, kv_eviction="ada-snapkv")
    with pytest.raises(KVEvictionError) as error:
        check(vllm_config, 7000, kv_eviction="snapkv")
    assert str(error.value) == (
        "the prompt's 7000 tokens do not fit the KV cache: the longest prompt that fits with kv_eviction=snapkv has "
        "6144 tokens, and this one fits with kv_eviction=take"
    )
    with pytest.raises(
        KVEvictionError, match="the longest prompt that fits with kv_eviction=full has 6144 tokens"
    ):
        check(vllm_config, 6145, kv_eviction="full")
    with pytest.raises(KVEvictionError, match=r"with kv_eviction=take has [0-9]+ tokens$"):
        check(vllm_config, 60_000, kv_budget=6000)


def test_the_longest_prompt_is_that_of_its_policys_own_parameters(models) -> None:
    """With copies of its sinks beside it, which the server's parameters ask for."""
    fields = {"kv_eviction": "kvzip", "kv_budget": 0.5}
    longest = {}
    for sinks in (4, 1000, 2000):
        config = {"policies": "all", "policy_params": {"kvzip": {"kvzip_sees": "chunk", "sinks": sinks}}}
        vllm_config = configure(models, blocks=48, kv_eviction="snapkv", kv_eviction_config=config)
        with pytest.raises(KVEvictionError) as error:
            check(vllm_config, 7000, **fields)
        longest[sinks] = int(re.search(r"kvzip has (\d+) tokens", str(error.value))[1])
        check(vllm_config, longest[sinks], **fields)
        with pytest.raises(KVEvictionError, match="do not fit"):
            check(vllm_config, longest[sinks] + 1, **fields)
    assert longest[4] - longest[1000] in range(950, 1050) and longest[1000] - longest[2000] in range(
        950, 1050
    )


def test_an_answer_that_might_not_fit_is_refused_before_a_stream_begins(models) -> None:
    """vLLM's server has sent status 200 by the time a prompt reaches the input processor."""
    vllm_config = configure(models, blocks=48, kv_eviction="snapkv", max_num_batched_tokens=2048)
    asking, prompt = SamplingParams(min_tokens=5634, max_tokens=6000), {"prompt_token_ids": [7] * 5000}
    engine = SimpleNamespace(vllm_config=vllm_config, renderer=SimpleNamespace(mm_processor_cache=None))
    with pytest.raises(
        VLLMValidationError, match=r"min_tokens is 5634, but .* only sure to hold 5633 tokens"
    ) as error:
        _check_generate(engine, prompt, asking)
    assert (error.value.parameter, error.value.value) == ("min_tokens", 5634)
    asking.min_tokens = 5633
    _check_generate(engine, prompt, asking)
    assert asking.max_tokens == 6000


def test_what_lies_aside_takes_its_part_of_the_memory(models, monkeypatch) -> None:
    """Of a server that keeps a score of two bytes beside entries of 256. What requests hold is taken before vLLM
    measures: it gives the KV cache what it finds free."""
    vllm_config = configure(models, kv_eviction="snapkv")
    plain, plans = memory.layout_of(vllm_config), [plan_for(options_of(vllm_config), 5000)]
    needed = memory.bytes_for(vllm_config, plans, 5000)
    layout = dataclasses.replace(plain, fields=(*plain.fields, Field("score", 1, "float16", aside=True)))
    for module in (memory, worker):
        monkeypatch.setattr(module, "layout_of", lambda *_: layout)
    more = memory.bytes_for(vllm_config, plans, 5000)
    assert (layout.page_bytes, layout.aside_bytes) == (32 * 256, 32 * 2) and 256 * more == 258 * needed

    calls: list[str] = []
    runtime = SimpleNamespace(take_reserve=lambda: calls.append("taken"), vllm_config=vllm_config)
    monkeypatch.setattr(worker, "get_runtime", lambda: runtime)
    found = type("Found", (), {"determine_available_memory": lambda self: calls.append("measured") or more})
    assert type("Worker", (worker._EvictionMixin, found), {})().determine_available_memory() == needed
    assert calls == ["taken", "measured"]


def test_memory_for_everything_needs_no_check(models) -> None:
    for blocks in (512, 0):  # enough, and not known yet
        vllm_config = configure(models, blocks=blocks, kv_eviction="snapkv")
        check(vllm_config, 60_000, 5536)
        check(vllm_config, 60_000, 5536, kv_eviction="full")


@pytest.mark.parametrize(
    "settings, engines",
    [
        ({}, 1),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 2),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_external_lb": True}, 1),
    ],
    ids=["one", "one machine", "two machines", "a front-end per machine", "a front-end per engine"],
)
def test_whose_blocks_a_front_end_counts_together(settings, engines):
    assert engines_of_front_end(ParallelConfig(**settings)) == engines
