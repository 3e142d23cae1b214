"""Decisions equal those of NVIDIA's kvpress 0.5.5, where both define the same thing.

Its presses get a Llama attention layer of transformers; ours get that layer's queries, keys, values and output
projection. Shares of the budget are translated: kvpress takes them of the budget with the window, whose tokens it
gives the highest scores; ours are shares of what remains beside the window.
"""

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm_kvevict.policies import EvictionConfig, LayerInputs, compactor, decide
from vllm_kvevict.policies.kvzip import repeat_attention
from vllm_kvevict.policies.tiles import TILE, tile_sums

HEADS, GROUP, SIZE, HIDDEN = 3, 2, 8, 36
WINDOW = 8
OURS = {"defaults": "paper", "window": WINDOW, "pooling": "avg", "kernel": 5}
THEIRS = {"window_size": WINDOW, "kernel_size": 5}

# Policy, its parameters, module and class of the press, its parameters, whether it is given the layer's attention.
CASES = {
    "snapkv": ("snapkv", OURS, "snapkv", "SnapKVPress", THEIRS, False),
    "snapkv-observed": ("snapkv", OURS, "snapkv", "SnapKVPress", THEIRS, True),
    "snapkv-window16": (
        "snapkv",
        OURS | {"window": 16, "kernel": 7},
        "snapkv",
        "SnapKVPress",
        {"window_size": 16, "kernel_size": 7},
        False,
    ),
    "tova": ("tova", {}, "tova", "TOVAPress", {}, False),
    "tova-observed": ("tova", {}, "tova", "TOVAPress", {}, True),
    "streaming-llm": (
        "streaming-llm",
        {"sinks": 4},
        "streaming_llm",
        "StreamingLLMPress",
        {"n_sink": 4},
        False,
    ),
    "knorm": ("knorm", {"window": 0}, "knorm", "KnormPress", {}, False),
    "keydiff": ("keydiff", {"window": 0}, "keydiff", "KeyDiffPress", {}, False),
    "expected-attention": (
        "expected-attention",
        {},
        "expected_attention",
        "ExpectedAttentionPress",
        {},
        False,
    ),
    "expected-attention-epsilon": (
        "expected-attention",
        {"epsilon": 0.01, "n_future": 9, "sinks": 7},
        "expected_attention",
        "ExpectedAttentionPress",
        {"epsilon": 0.01, "n_future_positions": 9, "n_sink": 7},
        False,
    ),
    "h2o": (
        "h2o",
        {"window": 0, "h2o_norm": "mean"},
        "observed_attention",
        "ObservedAttentionPress",
        {},
        True,
    ),
}

seeds = pytest.mark.parametrize("seed", range(4))
lengths = pytest.mark.parametrize(("n", "budget"), [(40, 17), (97, 31), (150, 120), (301, 60)])


def kvpress(module: str, name: str) -> Callable:
    """Something of kvpress, without the package's __init__: it needs data set tools and patches transformers."""
    if "kvpress" not in sys.modules:
        spec = importlib.util.find_spec("kvpress")
        if spec is None:
            raise ModuleNotFoundError("kvpress is missing: `make install` installs it")
        sys.modules["kvpress"] = importlib.util.module_from_spec(spec)
    return getattr(importlib.import_module(f"kvpress.{module}"), name)


def press(module: str, name: str, *args, **params) -> object:
    return kvpress(f"presses.{module}_press", name)(*args, **params)


def ratio_for(n: int, budget: float) -> float:
    """The compression ratio that leaves `budget` of n tokens."""
    return 1 - budget / n


def snapkv_press(n: int, budget: int) -> object:
    return press("snapkv", "SnapKVPress", ratio_for(n, budget + 0.5), **THEIRS)  # it truncates


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
    other = press(module, name, ratio_for(n, budget + 0.5), **press_params)
    (kept,) = ours(EvictionConfig(policy, budget=budget, **params), layer)
    check_same(kept, theirs(other, layer, observed), scores(other, layer, observed))


@seeds
@lengths
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_adaptive_heads(alpha, n, budget, seed):
    """kvpress guarantees each head floor(alpha*B) tokens, of which the window is the first part."""
    layer = make_layer(seed, n)
    snapkv = snapkv_press(n, budget)
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


@seeds
@lengths
@pytest.mark.parametrize("first", [0.5, 0.75, 1.0])
def test_criticalkv(first, n, budget, seed):
    """The first round of kvpress takes floor(first*B) tokens, of which the window is the first part."""
    layer = make_layer(seed, n)
    snapkv = snapkv_press(n, budget)
    sure = int(first * (budget + 0.5)) - WINDOW
    assert sure >= 0  # else its second round might drop window tokens
    cfg = EvictionConfig("criticalkv", budget=budget, first=share(sure, budget - WINDOW), **OURS)
    (kept,) = ours(cfg, layer)
    other = press("criticalkv", "CriticalKVPress", snapkv, first_stage_ratio=first)
    check_same(kept, theirs(other, layer), scores(snapkv, layer), scores(other, layer))


@seeds
@lengths
@pytest.mark.parametrize(("first", "alpha"), [(0.0, 0.0), (1.0, 0.0), (1.0, 0.5)])
def test_adaptive_criticalkv(first, alpha, n, budget, seed):
    """One round alone: kvpress's first one is a share of each head's budget with the window, ours without."""
    layer = make_layer(seed, n)
    snapkv = snapkv_press(n, budget)
    past = budget - WINDOW
    cfg = EvictionConfig(
        "ada-criticalkv", budget=budget, first=first, alpha=alpha, ada_safeguard="guarantee", **OURS
    )
    (kept,) = ours(cfg, layer)
    safe = share(WINDOW + int(alpha * past), budget)
    other = press("criticalkv", "CriticalAdaKVPress", snapkv, safe, first_stage_ratio=first)
    second = press("criticalkv", "CriticalKVPress", snapkv, first_stage_ratio=0)
    check_same(kept, theirs(other, layer), scores(snapkv, layer), scores(second, layer), adaptive=True)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("n", "budget", "window", "beta", "their_beta", "num_layers"),
    [(60, 24, 8, 4, 2, 3), (60, 24, 8, 4, 2, 5), (200, 72, 8, 4, 3, 4), (1000, 480, 5, 25, 20, 3)],
)
def test_pyramid(n, budget, window, beta, their_beta, num_layers, seed):
    """kvpress's pyramid has the window inside. With 1 - 1/their_beta = (1 - window/B)*(1 - 1/beta) both are one."""
    layers = [make_layer(seed, n, i, num_layers) for i in range(num_layers)]
    cfg = EvictionConfig("pyramidkv", budget=budget, beta=beta, **(OURS | {"window": window}))
    other = press("pyramidkv", "PyramidKVPress", ratio_for(n, budget), window, 5, their_beta)
    kept = ours(cfg, *layers)
    sizes = [len(layer[0]) for layer in kept]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    for layer, x in zip(layers, kept, strict=True):
        check_same(x, theirs(other, layer), scores(other, layer))


@seeds
def test_selection_with_given_pyramid_budgets(seed):
    """A pyramid cut off at the prompt's length, where the two rules give layers different budgets."""
    n, num_layers = 301, 4
    other = press("pyramidkv", "PyramidKVPress", ratio_for(n, 200), **THEIRS)
    layers = [make_layer(seed, n, i, num_layers) for i in range(num_layers)]
    budgets = [other.get_layer_budget(layer.module, n) for layer in layers]
    assert len(set(budgets)) == num_layers
    for layer, budget in zip(layers, budgets, strict=True):
        (kept,) = ours(EvictionConfig("snapkv", budget=budget, **OURS), layer)
        check_same(kept, theirs(other, layer), scores(other, layer))


@seeds
@pytest.mark.parametrize("n", [60, 301])
def test_leverage(n, seed, monkeypatch):
    """With the projection and the ridge of ours; kvpress draws others at each call, and takes a prompt as one chunk."""
    layer = make_layer(seed, n)
    phi = compactor.projection(SIZE)
    drawn = (phi * compactor.SKETCH**0.5).float()
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: drawn.expand(shape))
    monkeypatch.setattr(compactor, "projection", lambda size: phi)
    monkeypatch.setattr(compactor, "REGULARIZER", 1e-2)
    (chunk,) = compactor.leverage(layer.inputs(1), 1000)
    wanted = scores(press("leverage", "LeverageScorePress"), layer)
    # Its standard deviation is that of a sample.
    factor = ((chunk.numel() - 1) / chunk.numel()) ** 0.5
    found = compactor.standardized(chunk, None).float() * factor
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.roll(1, 1), wanted, rtol=0.01, atol=0.01)


@seeds
def test_attention_within_tiles(seed):
    """kvpress lets the last tile attend to its padding, so only whole tiles are alike."""
    attend = kvpress("presses.non_causal_attention_press", "NonCausalAttnPress").non_causal_chunked_attn
    for n in (256, 301):
        layer = make_layer(seed, n)
        wanted = attend(layer.queries, layer.keys.repeat_interleave(GROUP, 1), TILE)[0]
        found = tile_sums(layer.inputs(1))
        torch.testing.assert_close(found[:, :256], wanted[:, :256])
    assert not torch.allclose(found[:, 256:], wanted[:, 256:])


def test_ratios():
    """The same number of tokens, but for products that fall just below an integer: kvpress truncates those."""
    compute_n_kept = kvpress("utils", "compute_n_kept")
    for percent in range(1, 100):
        cfg = EvictionConfig("snapkv", keep_ratio=percent / 100)
        for n in range(1, 400):
            budget = max(1, n * percent // 100)
            assert cfg.budget_for(n) == budget
            assert budget - compute_n_kept(n, 1 - percent / 100) in (
                [0, 1] if n * percent % 100 == 0 else [0]
            )


def repeated(layers: list[Layer], n: int, chunks: list[tuple[int, int]]) -> tuple[object, list[Tensor]]:
    """A press and our counts after the same repeats: all tokens from n on are the rows of each chunk.

    Returns:
        The press, with its scores; what each token of each layer received, [Hkv, n].
    """
    other = press("kvzip", "KVzipPress", n_sink=4)
    other.context_length = n
    other.score_val = torch.zeros(len(layers), 1, HEADS, n)
    most = [torch.zeros(HEADS, n) for _ in layers]
    for start, stop in chunks:
        other.start_idx, other.end_idx = start, stop
        seen = torch.cat((torch.arange(min(4, start)), torch.arange(start, stop)))
        for layer, counts in zip(layers, most, strict=True):
            rows = {"position_embeddings": tuple(part[:, n:] for part in layer.rotary)}
            other.score_kvzip(layer.module, layer.hidden[:, n:], layer.keys, layer.values, None, rows)
            keys = layer.keys[0, :, torch.cat((seen, torch.arange(n, layer.keys.shape[2])))]
            candidates = slice(len(seen) - (stop - start), len(seen))
            queries = layer.queries[0, :, n:]
            counts[:, start:stop] = repeat_attention(queries, keys, candidates, SIZE**-0.5, None)
    return other, most


@seeds
@torch.no_grad()
def test_kvzip(seed):
    """The same scores of three chunks, and the same choice among all heads of all layers."""
    n, rows, num_layers, budget = 150, 40, 3, 31
    layers = [make_layer(seed, n + rows, i, num_layers) for i in range(num_layers)]
    other, most = repeated(layers, n, [(0, 64), (64, 128), (128, n)])
    for theirs_, counts in zip(other.score_val[:, 0], most, strict=True):
        torch.testing.assert_close(counts, theirs_, rtol=1e-5, atol=1e-7)
    gone = num_layers * HEADS * (n - budget)
    other.compression_ratio = share(gone, other.score_val.numel())
    other.compress_post(SimpleNamespace(model=SimpleNamespace(layers=[masked(layer) for layer in layers])))
    empty = torch.empty(HEADS, n, 1, device="meta")
    kept = decide(
        EvictionConfig("kvzip", budget=budget), [LayerInputs(None, empty, repeated=x) for x in most]
    )
    for layer, mine in zip(layers, kept, strict=True):
        stays = torch.ones(HEADS, n, dtype=torch.bool)
        _, heads, positions = layer.module.masked_key_indices
        stays[heads, positions] = False
        assert [row.nonzero()[:, 0].tolist() for row in stays] == [head.tolist() for head in mine]


def masked(layer: Layer) -> SimpleNamespace:
    """A layer of a model whose press notes there what it drops."""
    return SimpleNamespace(self_attn=layer.module)
