"""Rotary embeddings are undone as the model's own module makes them; what cannot be undone is told from what can."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.worker.rotary import TURNS_IF, ModelRotary

SIZE, LONGEST = 16, 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"is_neox_style": False},
    "partial": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "partial interleaved": {"is_neox_style": False, "rope_parameters": {"partial_rotary_factor": 0.25}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_parameters": YARN},
    "llama3": {"rope_parameters": LLAMA3},
}


def rope(rope_parameters: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    """A module of vLLM's."""
    parameters = {"rope_type": "default", "rope_theta": 100.0, **(rope_parameters or {})}
    with set_current_vllm_config(VllmConfig()), mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True):
        return rotary_embedding.get_rope(
            SIZE, LONGEST, rope_parameters=parameters, dtype=torch.float32, **settings
        )


class Layer(nn.Module):
    """An attention layer and what lies beside it."""

    def __init__(self, *ropes: nn.Module):
        super().__init__()
        self.attn = nn.Identity()
        self.attn.head_size = SIZE
        for number, module in enumerate(ropes):
            setattr(self, f"rotary_emb{number}", module)


def found(*layers: Layer, positions: int = LONGEST, head_size: int = SIZE) -> ModelRotary:
    return ModelRotary(nn.ModuleList(layers), [layer.attn for layer in layers], positions, head_size)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_module_does_is_undone(kind: str) -> None:
    module = rope(**KINDS[kind])
    rotary = found(Layer(module), Layer(module))
    assert rotary.available
    before = torch.randn(20, 3, SIZE, dtype=torch.float32)
    positions = torch.arange(7, 27)
    after, _ = module.forward_native(positions, before.flatten(1).clone(), None)
    turned = after.view(20, 3, SIZE).transpose(0, 1)
    tables = rotary.read()
    torch.testing.assert_close(tables.undo(turned, 7), before.transpose(0, 1), atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(tables.undo(turned, 8), before.transpose(0, 1), atol=1e-4, rtol=1e-4)
    # On average over these positions, of the same vector at each.
    same = before[:1].expand(20, 3, SIZE)
    mean, _ = module.forward_native(positions, same.flatten(1).clone(), None)
    expected = before[0].double() @ tables.mean(7, 20, SIZE).T
    torch.testing.assert_close(mean.view(20, 3, SIZE).double().mean(0), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_undone_is_not_available() -> None:
    plain, other = rope(), rope(is_neox_style=False)

    class Changed(type(plain)):  # type: ignore[misc]
        """May turn in its own way."""

    changed = rope()
    changed.__class__ = Changed
    several = rope({"rope_type": "linear", "factor": 2.0})
    assert found(Layer(several)).available
    several.scaling_factors = [1.0, 2.0]
    sections = rope({"rope_type": "default", "mrope_section": [2, 3, 3]})
    for layers in (
        [Layer()],
        [Layer(plain), Layer()],
        [Layer(plain), Layer(other)],
        [Layer(plain, other)],
        [Layer(changed)],
        [Layer(several)],
        [Layer(sections)],
    ):
        assert not found(*layers).available
    assert found(Layer(plain), Layer(plain)).available
    assert not found(Layer(plain), positions=LONGEST + 1).available
    assert not found(Layer(plain), head_size=SIZE - 1).available


@pytest.mark.parametrize("name", TURNS_IF)
def test_layers_that_hold_one_and_do_not_use_it(name: str) -> None:
    """One of them is enough; subclasses are told from others as well."""
    module, unused = rope(), dict.fromkeys(TURNS_IF[name], None)
    kind = type(name, (Layer,), {})
    for made in (kind, type("Changed", (kind,), {})):
        for condition in TURNS_IF[name]:
            layers = [made(module), made(module)]
            for layer in layers:
                vars(layer).update(unused | {condition: 64})
            assert found(*layers).available
            vars(layers[1]).update(unused)
            assert not found(*layers).available


@pytest.mark.engine
def test_models_without_one(models, monkeypatch) -> None:
    """The server's own policy is refused at the start; requests that name such a policy are kept whole."""
    monkeypatch.setattr(ModelRotary, "available", property(lambda self: False))
    refused = evicting_engine(models("llama"), eviction={"policy": "compactor", "budget": 0.5})
    with pytest.raises(KVEvictionError, match="compactor needs a rotary embedding"), refused:
        pass
    asks = [Ask(300, policy, 0.3, max_tokens=2) for policy in ("compactor", "expected-attention", "snapkv")]
    with evicting_engine(models("llama")) as llm:
        kept = [len(answer.kept) for answer in run(llm, asks)]
    assert kept == [0, 0, 1]
