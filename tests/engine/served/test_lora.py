"""LoRA adapters beside eviction: each request as a model answers it into whose weights its adapter was merged."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from benchmarks.harness.models import make_variant
from tests.engine.support.running import Ask, assert_same, engine, evicting_engine, run, tokens_of

RANK = 8
# One more than there are adapters: on a CPU, vLLM gives requests without an adapter the weights in the last place.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """Two adapters, and for each the model that it makes of the plain one."""
    root = tmp_path_factory.mktemp("adapters")
    return [_make_adapter(root / f"adapter-{seed}", model, seed) for seed in (1, 2)]


def _make_adapter(folder: Path, model: Path, seed: int) -> tuple[LoRARequest, Path]:
    """Write a random adapter, and a model with the same change in its weights."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": PROJECTIONS,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    weights, factors = load_file(model / "model.safetensors"), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(PROJECTIONS):
            continue
        down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
        factors[f"base_model.model.{module}.lora_A.weight"] = down
        factors[f"base_model.model.{module}.lora_B.weight"] = up
        weights[name] = weight + up @ down
    save_file(factors, folder / "adapter_model.safetensors")
    merged = make_variant(folder / "merged", model, weights)
    return LoRARequest(folder.name, seed, str(folder)), merged


def _asks(adapters, policy="full", budget=None):
    """A batch in which requests of both adapters and of none follow each other."""
    choices = [None, *(adapter for adapter, _ in adapters)]
    return [
        Ask(length, policy, budget, max_tokens=32, adapter=choices[i % 3])
        for i, length in enumerate((300, 310, 320, 33, 200, 450))
    ]


@pytest.mark.engine
def test_a_mixed_batch_equals_stock_when_nothing_is_evicted(model, adapters):
    with engine(model, **LORA) as llm:
        stock = tokens_of(run(llm, _asks(adapters), recorded=False))
    with engine(model) as llm:
        plain = [Ask(ask.length, max_tokens=32) for ask in _asks(adapters)]
        without = tokens_of(run(llm, plain, recorded=False))
    assert [mine == other for mine, other in zip(stock, without, strict=True)] == [True, False, False] * 2
    with evicting_engine(model, **LORA, max_num_seqs=16, max_num_batched_tokens=96) as llm:
        assert tokens_of(run(llm, _asks(adapters))) == stock
        assert tokens_of(run(llm, _asks(adapters, "ada-snapkv", 1.0))) == stock


TAKE = {"policy": "take", "budget": 64, "take_chunk": 64, "take_probe": 16}
LOOKAHEAD = {"policy": "snapkv", "lookahead": 20}
SERVERS = [
    ({"ada-snapkv": 0.2, "compactor": 0.5}, {}),
    ({"take": 64.0}, TAKE),
    ({"ada-snapkv": 0.2, "pyramidkv": 0.3}, LOOKAHEAD),
]


@pytest.mark.engine
@pytest.mark.parametrize(("policies", "eviction"), SERVERS, ids=["prompts", "take", "lookahead"])
def test_what_is_kept_is_what_the_merged_model_keeps(model, adapters, policies, eviction):
    asks = [ask for policy, budget in policies.items() for ask in _asks(adapters, policy, budget)]
    with evicting_engine(model, **LORA, eviction=eviction) as llm:
        answers = run(llm, asks, logits=True)
    without_adapter = [dataclasses.replace(ask, adapter=None) for ask in asks]
    with evicting_engine(model, eviction=eviction) as llm:
        plain = run(llm, without_adapter, logits=True)
    assert_same(answers[::3], plain[::3])
    for first, (_, merged) in enumerate(adapters, start=1):
        with evicting_engine(merged, eviction=eviction) as llm:
            expected = run(llm, without_adapter[first::3], logits=True)
        assert_same(answers[first::3], expected)
        assert plain[first].kept != expected[0].kept
