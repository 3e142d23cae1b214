"""Which layers are evicted: what the configuration predicts, what vLLM's groups say, and that workers compare."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.layers import LayerMap, is_evicted
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.engine.worker.attach import _check_layers

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=64, **SHAPE)
STATE = MambaSpec(block_size=512, shapes=((FULL.page_size_bytes,),), dtypes=(torch.int8,))


def group(spec, *layers):
    return KVCacheGroupSpec([f"model.layers.{layer}.self_attn.attn" for layer in layers], spec)


def test_full_attention_alone_is_evicted():
    ours = BoundedAttentionSpec.of(FULL)
    assert dataclasses.asdict(ours) == dataclasses.asdict(FULL) and is_evicted(ours) and is_evicted(FULL)
    latent = MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1})
    assert not any(map(is_evicted, (WINDOW, STATE, latent)))


def test_groups_are_told_apart():
    layers = LayerMap.found([group(FULL, 1, 5), group(WINDOW, 0, 2), group(FULL, 9), group(STATE, 3, 4)])
    assert layers == LayerMap(((1, 5), (9,)), ((), ()), (WINDOW, STATE))
    assert not layers.all_evicted and layers.evicted_layers == [1, 5, 9]
    assert [layers.on_stage(stage) for stage in (range(4), range(4, 10))] == [range(1), range(1, 3)]
    assert [layers.places(stage) for stage in (range(4), range(4, 10))] == [1, 1]


@pytest.mark.parametrize(
    "layers, is_right", [((4, 5, 6, 7), True), ((4, 5, 6), False), ((3, 4, 5, 6), False)]
)
def test_a_worker_compares_what_it_finds(layers, is_right):
    model = SimpleNamespace(
        model="m", hf_text_config=SimpleNamespace(), get_total_num_hidden_layers=lambda: 12
    )
    arguments = SimpleNamespace(model_config=model), LayerMap.found([group(FULL, *layers)]), range(4, 8)
    if is_right:
        _check_layers(*arguments)
        return
    with pytest.raises(KVEvictionError, match="disagree about which layers"):
        _check_layers(*arguments)
