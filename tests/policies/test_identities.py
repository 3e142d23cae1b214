"""Policies that must coincide, settings that must not, Ada-KV's optimality, NaN."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    decide,
    parameters,
    score_layer,
    select,
)
from vllm_kvevict.policies.attention import combine_rows, pool

from . import reference_select
from .reference_scores import SCORE, pooled

N, WINDOW, LAYERS = 100, 8, 4
ANGLES = torch.arange(N)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
ROTARY = (ANGLES.cos(), ANGLES.sin())
SCORED = [policy for policy in available() if SCORE[policy]]


def inputs(seed: int, num_layers: int = LAYERS, values: str = "random") -> list[LayerInputs]:
    """Three KV heads; the largest values of the first one lie in the window."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(num_layers):
        q_all, k = torch.randn(6, N, 8, generator=g) * 2, torch.randn(3, N, 8, generator=g) * 2
        v, w_o = torch.randn(3, N, 8, generator=g), torch.randn(6, 8, 16, generator=g)
        v[0, -WINDOW:] *= 3
        if values == "unit":
            v = torch.eye(8)[torch.randint(0, 8, (3, N), generator=g)]
        x = LayerInputs(q_all[:, -WINDOW:], k, v, q_all=q_all, w_o=w_o, rotary=ROTARY)
        # No more than a window pays, or it would not count beside that.
        result.append(dataclasses.replace(x, repeated=q_all.sum(2).abs().view(3, 2, N).amax(1) / 100))
    return result


def config(policy: str, **params) -> EvictionConfig:
    """The paper's parameters, a budget of 30 with a window of 8, and no sinks beside it."""
    sizes = {"window": WINDOW, "take_probe": WINDOW, "sinks": 0}
    sizes = {name: size for name, size in sizes.items() if name in parameters(policy)}
    return EvictionConfig(policy, budget=30, defaults="paper", **(sizes | params))


def as_lists(kept) -> list:
    return [[head.tolist() for head in layer] for layer in kept]


def kept(policy: str, seed: int, *, layers: list[LayerInputs] | None = None, **params) -> list:
    return as_lists(decide(config(policy, **params), layers or inputs(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_limits_of_the_parameters(seed):
    snapkv = kept("snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=1) == snapkv
    assert kept("ada-snapkv", seed, alpha=1, ada_safeguard="guarantee") == snapkv
    assert kept("ada-snapkv", seed, alpha=0, ada_safeguard="paper") == snapkv
    assert kept("pyramidkv", seed, beta=1) == snapkv
    assert kept("ada-pyramid", seed, alpha=1) == kept("pyramidkv", seed)
    assert kept("ada-pyramid", seed, beta=1) == kept("ada-snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=0, ada_safeguard="guarantee") == kept("ada-snapkv", seed, alpha=0)
    assert kept("snapkv", seed, pooling="max", kernel=1) == kept("snapkv", seed, pooling="none")
    assert kept("lava", seed, alpha=1) == kept("lava-uniform-head", seed)
    assert kept("lava-uniform", seed, alpha=1) == kept("snapkv", seed, gqa="max")
    assert kept("lava-pyramid", seed, beta=1) == kept("lava-uniform", seed)
    assert kept("lava-pyramid", seed, alpha=1) == kept("pyramidkv", seed, gqa="max")
    assert kept("criticalkv", seed, first=1) == snapkv
    assert kept("ada-criticalkv", seed, first=1) == kept("ada-snapkv", seed)
    assert kept("ada-criticalkv", seed, alpha=1) == kept("criticalkv", seed)
    assert kept("snapkv", seed, window=1, rows="max") == kept("snapkv", seed, window=1)
    assert all(head == layer[0] for layer in kept("tova", seed) for head in layer)
    assert kept("knorm", seed, skip_layers=LAYERS) == [[list(range(N))] * 3] * LAYERS
    assert kept("knorm", seed, skip_layers=2)[2:] == kept("knorm", seed)[2:]


@pytest.mark.parametrize("seed", range(5))
def test_kvzip_keeps_what_a_window_asks_for(seed):
    given = inputs(seed)
    assert all(
        head[-WINDOW:] == list(range(N - WINDOW, N)) for layer in kept("kvzip", seed) for head in layer
    )
    # A prompt that repeating says nothing about is kept as one of the policies is that read the window alone.
    (quiet,) = (dataclasses.replace(x, repeated=torch.zeros(3, N)) for x in given[:1])
    same = {"rows": "max", "gqa": "max", "alpha": 0}
    for pooling in ({"pooling": "avg", "kernel": 3}, {"pooling": "decay"}, {}):
        found = kept("kvzip", seed, layers=[quiet], **pooling)
        assert found == kept("ada-snapkv", seed, layers=[quiet], **same, **pooling)
    # Queries that ask for nothing in particular change nothing.
    blank = [dataclasses.replace(x, q_window=0 * x.q_window, repeated=x.repeated + 0.1) for x in given]
    past = [x.repeated[:, : N - WINDOW] for x in blank]
    scores = [score_layer(config("kvzip"), x, i, LAYERS).scores for i, x in enumerate(blank)]
    assert all(torch.equal(*pair) for pair in zip(scores, past, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_one_layer_has_the_whole_budget(seed):
    one = inputs(seed, 1)
    assert kept("lava", seed, layers=one) == kept("lava-uniform", seed, layers=one)
    assert kept("lava-uniform-head", seed, layers=one) == kept("snapkv", seed, layers=one, gqa="max")
    assert kept("cake", seed, layers=one, gamma=0, pooling="none") == kept(
        "snapkv", seed, layers=one, pooling="none"
    )
    assert kept("layer-defensivekv", seed, layers=one) == kept("defensivekv", seed, layers=one)


@pytest.mark.parametrize("seed", range(5))
def test_equal_layers_get_equal_budgets(seed):
    equal = inputs(seed, 1) * LAYERS
    assert kept("lava", seed, layers=equal) == kept("lava-uniform", seed, layers=equal)
    assert kept("lava-uniform-head", seed, layers=equal) == kept("snapkv", seed, layers=equal, gqa="max")
    assert all(len(head) == 30 for layer in kept("cake", seed, layers=equal) for head in layer)
    # Lifted tokens are equal among heads as well, and ties go to a layer before they go to a head.
    distinct = {"layers": equal, "mass": 0}
    assert kept("layer-defensivekv", seed, **distinct) == kept("defensivekv", seed, **distinct)


def test_what_recent_queries_look_at_counts_more():
    attention = torch.zeros(1, 25, 4)
    attention[0, 24, 0] = attention[0, 12, 1] = attention[0, 0, 2] = 0.8
    torch.testing.assert_close(combine_rows(attention, "recent"), torch.tensor([[0.8, 0.4, 0.2, 0.0]]))


def test_a_score_fades_with_the_distance():
    scores = torch.zeros(2, 100)
    scores[0, 50], scores[1, 2], scores[1, 97] = 1.0, 1.0, 0.5
    found = pool(scores, "decay", None)
    later, earlier = 0.95 ** torch.arange(32), 0.95 ** torch.arange(7, -1, -1)
    wanted = torch.zeros(2, 100)
    wanted[0, 50:82] = later
    wanted[0, 43:51] = earlier
    wanted[1, 2:34], wanted[1, :3] = later, earlier[-3:]
    wanted[1, 97:], wanted[1, 90:98] = later[:3] / 2, earlier / 2
    torch.testing.assert_close(found, wanted)


def test_the_first_token_counts_for_itself_alone():
    scores = torch.zeros(1, 40)
    scores[0, 0], scores[0, 4] = 1.0, 0.5
    found = pool(scores, "decay", None)[0]
    assert found[0] == 1.0
    scores[0, 0] = 0.0
    torch.testing.assert_close(found[1:], pool(scores, "decay", None)[0, 1:])
    assert found[3] == 0.5 * 0.95


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31, 32, 33])
def test_what_fades_in_a_few_tokens(length):
    scores = torch.rand(1, length, generator=torch.Generator().manual_seed(length))
    before = scores.clone()
    wanted = [pooled(row, "decay", 0) for row in scores.tolist()]
    torch.testing.assert_close(pool(scores, "decay", None), torch.tensor(wanted))
    assert torch.equal(scores, before)
    assert torch.equal(pool(torch.ones(1, length), "decay", None), torch.ones(1, length))


def test_a_maximum_does_not_count_how_many_queries_agree():
    """Of a token that one query needs, and one that the seven others would like to see."""
    one, many = torch.eye(8)[0], torch.eye(8)[1]
    keys = torch.zeros(3, N, 8)
    keys[:, 40], keys[:, 60] = one, many
    query = (18 * many).repeat(6, WINDOW, 1)
    query[:, 3] = 24 * one
    for rows, first, second in (("max", 40, 60), ("mean", 60, 40)):
        cfg = config("snapkv", rows=rows, pooling="none")
        scores = score_layer(cfg, LayerInputs(query, keys), 0, 1).scores
        assert scores.argsort(1, descending=True)[:, :2].tolist() == [[first, second]] * 3


@pytest.mark.parametrize("seed", range(5))
def test_unit_value_norms_change_nothing(seed):
    unit = inputs(seed, values="unit")
    assert kept("vatp-snapkv", seed, layers=unit) == kept("snapkv", seed, layers=unit)
    assert kept("lava-uniform", seed, layers=unit) == kept(
        "ada-snapkv", seed, layers=unit, gqa="max", alpha=0
    )
    assert kept("lava-uniform", seed, layers=unit, gqa="mean", pooling="none", alpha=0.2) == kept(
        "ada-snapkv", seed, layers=unit, pooling="none"
    )
    doubled = [
        LayerScores(i, LAYERS, 3, x, second=2 * x) for i, x in enumerate(torch.rand(LAYERS, 3, N - WINDOW))
    ]
    assert as_lists(select(config("criticalkv"), doubled, N)) == as_lists(
        select(config("snapkv"), doubled, N)
    )


def test_keydiff_sees_directions_alone_and_knorm_lengths_alone():
    (x,) = inputs(3, 1)
    sizes = 2.0 ** torch.randint(-2, 3, (3, N, 1), generator=torch.Generator().manual_seed(3))
    scaled, turned = LayerInputs(None, x.keys * sizes), LayerInputs(None, -x.keys.flip(2))
    plain = LayerInputs(None, x.keys)
    assert kept("keydiff", 3, layers=[scaled]) == kept("keydiff", 3, layers=[plain])
    assert kept("knorm", 3, layers=[scaled]) != kept("knorm", 3, layers=[plain])
    wanted = score_layer(config("knorm"), plain, 0, 1).scores
    torch.testing.assert_close(score_layer(config("knorm"), turned, 0, 1).scores, wanted)


def test_no_token_is_lifted_without_mass():
    """Lifted tokens are the only ones that share the highest score."""
    for mass, at_least, at_most in ((0.0, 1, 1), (1.0, 3, 1 + 3 * 22)):
        cfg = config("defensivekv", mass=mass)
        for x in inputs(1):
            scores = score_layer(cfg, x, 0, 1).scores
            assert at_least <= int((scores == scores.max()).sum()) <= at_most


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["ada-snapkv", "ada-pyramid", "ada-criticalkv"])
def test_paper_safeguard_is_interp_with_the_weights_swapped(policy, alpha):
    assert kept(policy, 1, alpha=alpha, ada_safeguard="paper") == kept(policy, 1, alpha=1 - alpha)


# Another value for every parameter; tp_local changes nothing on one device.
OTHER = {
    "window": 5,
    "kernel": 3,
    "pooling": "none",
    "gqa": None,
    "rows": "max",
    "sinks": 3,
    "beta": 2,
    "pyramid_rounding": "official",
    "alpha": 0.9,
    "ada_safeguard": "guarantee",
    "h2o_norm": "mean",
    "gamma": 0.0,
    "tau1": 0.2,
    "tau2": 4.0,
    "skip_layers": 1,
    "first": 0.1,
    "mass": 0.3,
    "take_probe": 3,
    "take_warmup_layers": 0,
    "leverage_chunk": 20,
    "blend": 3.0,
    "n_future": 1,
    "epsilon": 0.1,
}
CHUNKED = ("take_chunk", "take_alpha", "take_warmup_budget", "take_guide", "kvzip_chunk", "kvzip_sees")
"""What matters while a prompt is read or repeated only."""
BASE = {"pyramid_rounding": {"beta": 9}, "beta": {"beta": 9}}


@pytest.mark.parametrize("policy", SCORED)
def test_every_parameter_matters(policy):
    for name, default in parameters(policy, "paper").items():
        if name == "tp_local":
            assert kept(policy, 2, tp_local=1) == kept(policy, 2)
            continue
        if name in CHUNKED:
            continue
        base = BASE.get(name, {})
        other = ("max" if default == "mean" else "mean") if name == "gqa" else OTHER[name]
        assert any(kept(policy, s, **base) != kept(policy, s, **{**base, name: other}) for s in (1, 2, 3)), (
            name
        )


def test_policies_differ():
    variants = {policy: str(kept(policy, 2)) for policy in SCORED}
    variants["streaming-llm"] = str(kept("streaming-llm", 2))
    variants["paper"] = str(kept("ada-snapkv", 2, ada_safeguard="paper"))
    variants["rows"] = str(kept("ada-snapkv", 2, rows="max"))
    variants["recent"] = str(kept("ada-snapkv", 2, rows="recent"))
    variants["decay"] = str(kept("ada-snapkv", 2, pooling="decay"))
    variants["both"] = str(kept("ada-snapkv", 2, rows="max", pooling="decay"))
    assert variants["snapkv"] != str(kept("snapkv", 2, kernel=31)) != str(kept("snapkv", 2, pooling="decay"))
    assert len(set(variants.values())) == len(variants)


@pytest.mark.parametrize("policy", ["ada-snapkv", "lava-uniform", "defensivekv", "compactor"])
def test_equal_scores_give_uniform_heads(policy):
    alpha = {"alpha": 0} if "alpha" in parameters(policy) else {}
    scores = LayerScores(0, 1, 4, torch.full((4, N - WINDOW), 0.5))
    (layer,) = select(config(policy, **alpha), [scores], N)
    assert all(head.tolist() == [*range(22), *range(N - WINDOW, N)] for head in layer)


def test_equal_scores_of_all_layers_give_uniform_layers():
    layers = [LayerScores(i, LAYERS, 4, torch.full((4, N - WINDOW), 0.5)) for i in range(LAYERS)]
    kept = select(config("layer-defensivekv"), layers, N)
    assert all(x.tolist() == [*range(22), *range(N - WINDOW, N)] for layer in kept for x in layer)


@pytest.mark.parametrize("policy", ["ada-snapkv", "lava", "defensivekv", "compactor"])
def test_a_head_may_keep_only_its_window(policy):
    scores = torch.zeros(2, N - WINDOW)
    scores[1] = 1
    alpha = {"alpha": 0} if "alpha" in parameters(policy) else {}
    (layer,) = select(config(policy, **alpha), [LayerScores(0, 1, 2, scores, weight=1.0)], N)
    assert layer[0].tolist() == list(range(N - WINDOW, N))
    assert len(layer[1]) == 2 * 22 + WINDOW


@settings(max_examples=60)
@given(st.integers(0, 2**30), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_retained_score(seed, alpha):
    """Ada-KV theorem 3.3: adaptive heads retain the most any allocation can, and never less than uniform ones."""
    m, b = N - WINDOW, 22
    scores = torch.rand(4, m, generator=torch.Generator().manual_seed(seed)) ** 4
    layer = [LayerScores(0, 1, 4, scores)]

    def retained(policy: str, **params) -> float:
        (heads,) = select(config(policy, **params), layer, N)
        return sum(scores[h, x[x < m]].double().sum().item() for h, x in enumerate(heads))

    best = scores.flatten().double().sort(descending=True).values[: 4 * b].sum().item()
    uniform = retained("snapkv")
    for policy in ("ada-snapkv", "lava-uniform"):
        assert retained(policy, alpha=0) == pytest.approx(best, rel=1e-12)
        assert retained(policy, alpha=alpha) >= uniform * (1 - 1e-12)
    for rule in ("interp", "paper", "guarantee"):
        assert retained("ada-snapkv", alpha=alpha, ada_safeguard=rule) >= uniform * (1 - 1e-12)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=2, max_size=3), st.integers(1, 4)
)
def test_no_allocation_retains_more(scores, b):
    """Theorem 3.3 against every way to share the layer's tokens between its heads."""
    heads, m = len(scores), 5
    ranked = [sorted(row, reverse=True) for row in scores]
    best = max(
        sum(sum(row[:count]) for row, count in zip(ranked, counts, strict=True))
        for counts in itertools.product(range(m + 1), repeat=heads)
        if sum(counts) == heads * b
    )
    cfg = EvictionConfig("ada-snapkv", budget=b + 1, window=1, alpha=0)
    (layer,) = select(cfg, [LayerScores(0, 1, heads, torch.tensor(scores, dtype=torch.float32))], m + 1)
    assert sum(scores[h][i] for h, x in enumerate(layer) for i in x.tolist() if i < m) == best


@pytest.mark.parametrize("policy", SCORED)
def test_nan_scores_are_the_lowest(policy):
    m = N - config(policy).window_for(N)
    scores = torch.rand(LAYERS, 2, m)
    scores[:, :, :20] = torch.nan
    layers = [LayerScores(i, LAYERS, 2, x, weight=1.0, second=x) for i, x in enumerate(scores)]
    kept = select(config(policy, **({"sinks": 0} if "sinks" in parameters(policy) else {})), layers, N)
    assert sum(len(head) for layer in kept for head in layer) == LAYERS * 60
    assert all(int(head[0]) >= 20 for layer in kept for head in layer)


@pytest.mark.parametrize("policy", SCORED)
def test_nan_inputs_leave_the_budgets_alone(policy):
    nan = [
        dataclasses.replace(
            x, keys=torch.full_like(x.keys, torch.nan), repeated=torch.full((3, N), torch.nan)
        )
        for x in inputs(0)
    ]
    kept = decide(config(policy, **({"beta": 1} if "beta" in parameters(policy) else {})), nan)
    assert [[len(head) for head in layer] for layer in kept] == [[30] * 3] * LAYERS


def test_one_layer_of_nan_gets_nothing_beyond_its_window():
    layers = inputs(0)
    layers[1] = LayerInputs(layers[1].q_window, layers[1].keys * torch.nan, layers[1].values)
    for policy in reference_select.DYNAMIC:
        kept = decide(config(policy), layers)
        assert [len(head) for head in kept[1]] == [WINDOW] * 3
        assert sum(len(head) for layer in kept for head in layer) == LAYERS * 3 * 30
