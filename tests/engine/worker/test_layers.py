"""Which layers are evicted: what the configuration predicts, what vLLM's groups say, and that workers compare."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from benchmarks.harness.models import make_model
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.layers import LayerMap, can_be_evicted, is_evicted
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.engine.worker.attach import _check_layers, _sizes
from vllm_kvevict.engine.worker.model_runners import zero_new_windows

SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
EVICTED = BoundedAttentionSpec.of(FULL)
WINDOW = SlidingWindowSpec(sliding_window=64, **SHAPE)
STATE = MambaSpec(block_size=512, shapes=((FULL.page_size_bytes,),), dtypes=(torch.int8,))


def group(spec, *layers):
    return KVCacheGroupSpec([f"model.layers.{layer}.self_attn.attn" for layer in layers], spec)


def test_full_attention_alone_is_evicted():
    ours = BoundedAttentionSpec.of(FULL)
    fields = [field.name for field in dataclasses.fields(AttentionSpec)]
    assert [getattr(ours, name) for name in fields] == [getattr(FULL, name) for name in fields]
    assert is_evicted(ours) and can_be_evicted(FULL)
    assert not can_be_evicted(dataclasses.replace(FULL, non_causal=True))
    latent = MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1})
    assert not any(map(can_be_evicted, (WINDOW, STATE, latent)))
    assert not any(map(is_evicted, (FULL, WINDOW, STATE, latent)))


def test_groups_are_told_apart():
    groups = [group(EVICTED, 1, 5), group(WINDOW, 0, 2), group(EVICTED, 9), group(STATE, 3, 4)]
    layers = LayerMap.found(groups)
    assert layers == LayerMap(((1, 5), (9,)), ((0, 1), (0, 1)), (WINDOW, STATE))
    assert not layers.all_evicted and layers.evicted_layers == [1, 5, 9]
    assert [layers.on_stage(stage) for stage in (range(4), range(4, 10))] == [range(1), range(1, 3)]
    assert [layers.places(stage) for stage in (range(4), range(4, 10))] == [2, 1]


@pytest.mark.parametrize(
    "layers, is_right", [((4, 5, 6, 7), True), ((4, 5, 6), False), ((3, 4, 5, 6), False)]
)
def test_a_worker_compares_what_it_finds(layers, is_right):
    model = SimpleNamespace(
        model="m", hf_text_config=SimpleNamespace(), get_total_num_hidden_layers=lambda: 12
    )
    config = SimpleNamespace(model_config=model, speculative_config=None)
    arguments = config, group(FULL, *layers).layer_names, range(4, 8)
    if is_right:
        _check_layers(*arguments)
        return
    with pytest.raises(KVEvictionError, match="disagree about which layers"):
        _check_layers(*arguments)


ONE, WINDOWS = ("FullAttentionSpec", 1), ("SlidingWindowSpec", 1)


@pytest.mark.parametrize(
    "served, layers, sizes, unlisted",
    [
        ("llama", 1, [("evicted", 1), ONE], (1, 2, 3)),
        ("llama", 3, [("evicted", 3), ("FullAttentionSpec", 3)], (3,)),
        ("llama", 5, [("evicted", 4), ("FullAttentionSpec", 5)], ()),
        ("gpt_oss", 1, [("evicted", 1), ONE, WINDOWS, WINDOWS], (3,)),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
def test_groups_beside_a_draft_model(
    models, tmp_path, kv_heads: int, served: str, layers: int, sizes: list, unlisted: tuple
) -> None:
    """As many evicted layers are listed as the draft model has, whose blocks are as large as the largest layer's."""
    drafter = make_model(tmp_path, layers=layers, kv_heads=kv_heads)
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    args = EngineArgs(str(models(served)), speculative_config=drafts, kv_eviction="full", block_size=32)
    config = args.create_engine_config()
    found = LayerMap.predicted(config)
    assert (sorted(_sizes(found)), found.unlisted) == (sorted(sizes), unlisted)
    assert found.enlarged == max(1, kv_heads / 2)
    assert found.undoes_rows == (served == "llama") and found.caches_prefixes and found.repeats_prompts


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
