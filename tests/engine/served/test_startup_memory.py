"""An engine starts with exactly the memory that ``inspect`` takes and ``sizing`` names, and not with a block less."""

import re

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.engine import sizing
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.memory import bytes_for, stages_of
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.server import Server

pytestmark = pytest.mark.engine
LENGTH = 1024
OPTIONS = {"policy": "full", "min_prompt": 0, "policies": "all"}
SETTINGS = {"dtype": "float32", "max_model_len": LENGTH, "max_num_batched_tokens": 256, "block_size": 128}


def memory_for(model):
    """What one request of the longest length needs, kept whole or evicted; and a block's part of it."""
    additional = {"kv_eviction": OPTIONS}
    config = EngineArgs(str(model), additional_config=additional, **SETTINGS).create_engine_config()
    options = require_options(config)
    fields = [{"kv_eviction": policy, "kv_budget": 0.5} for policy in ("full", "snapkv")]
    plans = [plan_for(options, LENGTH, given) for given in fields]
    needed = bytes_for(config, plans, LENGTH)
    places = max(map(LayerMap.predicted(config).places, stages_of(config)))
    return needed, places * config.cache_config.block_size * 2 * (2 * 32 * 4)


@pytest.mark.parametrize(
    ("architecture", "ahead"),
    [("llama", 0), ("llama", 32), ("nemotron_h", 0), ("falcon_h1", 0), ("gemma3_text", 0)],
)
def test_the_memory_that_is_asked_for_is_enough(models, architecture, ahead):
    """What is foreseen of windows, and of states that are cached, may be a block more than they need."""
    model = models(architecture)
    eviction = {"policy": "snapkv", "lookahead": ahead} if ahead else {}
    needed, block = memory_for(model)
    assert needed % block == 0
    with evicting_engine(model, eviction=eviction, kv_cache_memory_bytes=needed, **SETTINGS) as llm:
        longest = [Ask(LENGTH - 1, policy, 0.5, max_tokens=1) for policy in ("full", "snapkv")]
        assert all(len(answer.tokens) == 1 for answer in run(llm, longest))
    less = needed - (1 if architecture == "llama" else 2) * block
    with (
        pytest.raises(ValueError, match=f"--max-model-len {LENGTH}" if ahead else f"max seq len .{LENGTH}."),
        evicting_engine(model, eviction=eviction, kv_cache_memory_bytes=less, **SETTINGS),
    ):
        pass


def test_sizing_names_the_longest_model_len_that_vllm_starts_with(models):
    model = models("llama")
    needed, block = memory_for(model)
    shape = sizing.read_model(str(model), LENGTH, "float32")

    def longest(memory):
        server = Server(**shape, memory=memory, max_num_batched_tokens=256)
        row = sizing.size(server, {"policy": "full"}, 512, 16)
        assert row["longest"] == sizing.counted_blocks(server) * server.block_size
        return row["longest"]

    assert longest(needed) == LENGTH
    with (
        pytest.raises(ValueError) as refusal,
        evicting_engine(model, kv_cache_memory_bytes=needed - block, **SETTINGS),
    ):
        pass
    named = int(re.search(r"estimated maximum model length is (\d+)", str(refusal.value))[1])
    assert longest(needed - block) == named == LENGTH - 128
    with evicting_engine(model, kv_cache_memory_bytes=needed - block, **SETTINGS | {"max_model_len": named}):
        pass
