"""Which layers are evicted: what the configuration predicts, what vLLM's groups say, and that workers compare."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
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
from vllm_kvevict.engine.worker.model_runners import zero_new_windows

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=64, **SHAPE)
STATE = MambaSpec(block_size=512, shapes=((FULL.page_size_bytes,),), dtypes=(torch.int8,))


def group(spec, *layers):
    return KVCacheGroupSpec([f"model.layers.{layer}.self_attn.attn" for layer in layers], spec)


def test_full_attention_alone_is_evicted():
    ours = BoundedAttentionSpec.of(FULL)
    fields = [field.name for field in dataclasses.fields(AttentionSpec)]
    assert [getattr(ours, name) for name in fields] == [getattr(FULL, name) for name in fields]
    assert is_evicted(ours) and is_evicted(FULL)
    assert not is_evicted(dataclasses.replace(FULL, non_causal=True))
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


def test_windows_begin_with_zeros_in_blocks_that_were_states() -> None:
    caches = {f"model.layers.{layer}.self_attn.attn": torch.full((4, 2), torch.nan) for layer in range(3)}
    groups = [group(BoundedAttentionSpec.of(FULL), 0), group(WINDOW, 1), group(STATE, 2)]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(kv_cache=kv) for name, kv in caches.items()}
        ),
        _zero_block_ids=lambda block_ids: None,
    )
    zero_new_windows(runner)
    runner._zero_block_ids([1, 3])
    assert [kv.isnan().all(1).tolist() for kv in caches.values()] == [
        [True] * 4,
        [True, False] * 2,
        [True] * 4,
    ]
