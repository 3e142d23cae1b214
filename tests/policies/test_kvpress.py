"""Decisions equal those of NVIDIA's kvpress 0.5.5, where both define the same thing.

Its presses get a Llama attention layer of transformers; ours get that layer's queries, keys, values and output
projection. Shares of the budget are translated: kvpress takes them of the budget with the window, whose tokens it
gives the highest scores; ours are shares of what remains beside the window.
"""

import importlib
import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide

HEADS, GROUP, SIZE, HIDDEN = 3, 2, 8, 36
CASES = yaml.safe_load(Path(__file__).with_name("kvpress.yaml").read_text())
_, OURS, _, _, THEIRS, _ = CASES["snapkv"]
WINDOW = OURS["window"]

seeds = pytest.mark.parametrize("seed", range(4))
lengths = pytest.mark.parametrize(("n", "budget"), [(40, 17), (97, 31), (150, 120), (301, 60)])


def press(module: str, name: str, *args, **params) -> object:
    """A press, without the package's __init__: that needs data set tools and patches transformers."""
    if "kvpress" not in sys.modules:
        spec = importlib.util.find_spec("kvpress")
        if spec is None:
            raise ModuleNotFoundError("kvpress is missing: `make install` installs it")
        sys.modules["kvpress"] = importlib.util.module_from_spec(spec)
    return getattr(importlib.import_module(f"kvpress.presses.{module}_press"), name)(*args, **params)


def ratio_for(n: int, budget: int) -> float:
    """The compression ratio that leaves `budget` of n tokens; a press truncates."""
    return 1 - (budget + 0.5) / n


def share(part: int, whole: int) -> float:
    """A number f with floor(f*whole) == part, however the product is rounded."""
    return min(1.0, (part + 0.5) / whole)


@dataclass
class Layer:
    """An attention layer after its prefill."""

    module: LlamaAttention
    hidden: Tensor
    rotary: tuple[Tensor, Tensor]
    queries: Tensor  # after RoPE
    keys: Tensor
    values: Tensor
    attentions: Tensor

    def for_press(self, observed: bool) -> tuple:
        """The arguments of a press; without the layer's attention it recomputes what it needs."""
        attentions = self.attentions if observed else None
        return (
            self.module,
            self.hidden,
            self.keys,
            self.values,
            attentions,
            {"position_embeddings": self.rotary},
        )

    def inputs(self, window: int) -> LayerInputs:
        queries, n = self.queries[0], self.keys.shape[2]
        w_o = self.module.o_proj.weight.T.reshape(HEADS * GROUP, SIZE, HIDDEN)
        cos, sin = (table[0, :, : SIZE // 2] for table in self.rotary)
        return LayerInputs(
            queries[:, n - window :],
            self.keys[0],
            self.values[0],
            q_all=queries,
            w_o=w_o.detach(),
            rotary=(cos, sin),
        )


@torch.no_grad()
def make_layer(seed: int, n: int, layer: int = 0, num_layers: int = 1) -> Layer:
    """Random weights, n random tokens; keys, values and attention are the module's own."""
    torch.manual_seed(100 * seed + layer)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        num_hidden_layers=num_layers,
        attn_implementation="eager",  # returns its attention
    )
    module = LlamaAttention(config, layer).eval()
    hidden = 2 * torch.randn(1, n, HIDDEN)
    module.rotary_emb = LlamaRotaryEmbedding(config)  # where kvpress looks for it
    rotary = module.rotary_emb(hidden, torch.arange(n)[None])
    cache = DynamicCache(config=config)
    causal = torch.full((1, 1, n, n), -torch.inf).triu(1)
    _, attentions = module(hidden, rotary, causal, past_key_values=cache)
    config._attn_implementation = "sdpa"  # AdaKVPress refuses "eager"
    projected = module.q_proj(hidden).view(1, n, HEADS * GROUP, SIZE).transpose(1, 2)
    queries, _ = apply_rotary_pos_emb(projected, projected, *rotary)
    cached = cache.layers[layer]
    return Layer(module, hidden, rotary, queries, cached.keys, cached.values, attentions)


@torch.no_grad()
def theirs(press: object, layer: Layer, observed: bool = False) -> list[list[int]]:
    """Positions that a press keeps in each KV head: those it returns or, of adaptive heads, does not mask."""
    layer.module.masked_key_indices = None
    _, values = press.compress(*layer.for_press(observed))
    stays = torch.ones(layer.values.shape[1:3], dtype=torch.bool)
    if layer.module.masked_key_indices is not None:
        _, heads, positions = layer.module.masked_key_indices
        stays[heads, positions] = False
    else:
        same = (layer.values[0, :, :, None] == values[0, :, None]).all(-1)  # [Hkv, n, kept]
        assert bool((same.sum(1) == 1).all())
        stays = same.any(2)
    return [row.nonzero()[:, 0].tolist() for row in stays]


@torch.no_grad()
def scores(press: object, layer: Layer, observed: bool = False) -> Tensor:
    return press.score(*layer.for_press(observed))[0]


def ours(cfg: EvictionConfig, *layers: Layer) -> list[list[list[int]]]:
    window = cfg.params.get("window", 1)
    return [[h.tolist() for h in layer] for layer in decide(cfg, [x.inputs(window) for x in layers])]


def check_same(have: list, want: list, *rounds: Tensor, adaptive: bool = False) -> None:
    """Equal sets. Entries may be swapped if, in one of the rounds, their scores are within 1e-5 relative."""
    assert sum(map(len, have)) == sum(map(len, want))
    assert adaptive or [len(h) for h in have] == [len(h) for h in want]
    swapped = [[(h, i) for i in {*x} ^ {*y}] for h, (x, y) in enumerate(zip(have, want, strict=True))]
    if adaptive:
        swapped = [list(itertools.chain(*swapped))]
    for entries in filter(None, swapped):
        values = [torch.stack([x[entry] for entry in entries]) for x in rounds]
        near = [bool(v.max() - v.min() <= 1e-5 * v.abs().max() + 1e-9) for v in values]
        assert any(near), f"kept by one side only: (head, position) {sorted(entries)}"


@seeds
@lengths
@pytest.mark.parametrize("case", CASES)
def test_uniform_heads(case, n, budget, seed):
    policy, params, module, name, press_params, observed = CASES[case]
    layer = make_layer(seed, n)
    other = press(module, name, ratio_for(n, budget), **press_params)
    (kept,) = ours(EvictionConfig(policy, budget=budget, **params), layer)
    check_same(kept, theirs(other, layer, observed), scores(other, layer, observed))


@seeds
@lengths
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_adaptive_heads(alpha, n, budget, seed):
    """kvpress guarantees each head floor(alpha*B) tokens, of which the window is the first part."""
    layer = make_layer(seed, n)
    snapkv = press("snapkv", "SnapKVPress", ratio_for(n, budget), **THEIRS)
    guaranteed = max(0, int(alpha * budget) - WINDOW)
    cfg = EvictionConfig(
        "ada-snapkv",
        budget=budget,
        alpha=share(guaranteed, budget - WINDOW),
        ada_safeguard="guarantee",
        **OURS,
    )
    (kept,) = ours(cfg, layer)
    check_same(
        kept,
        theirs(press("adakv", "AdaKVPress", snapkv, alpha), layer),
        scores(snapkv, layer),
        adaptive=True,
    )
