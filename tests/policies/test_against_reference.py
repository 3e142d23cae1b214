"""Every policy against the slow reference: random shapes, edge lengths, dtypes, exact selection."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    Rotary,
    available,
    decoding_policies,
    layer_budgets,
    parameters,
    score_layer,
    select,
    take,
)

from . import reference, reference_select
from .layers import those_of
from .reference_scores import SCORE, Scored, Tensors, Turns
from .seeds import named

CHOICES = yaml.safe_load(Path(__file__).with_name("choices.yaml").read_text())
WINDOWLESS = ("h2o", "knorm", "keydiff", "compactor")
READ_ALL_QUERIES = ("h2o", "compactor", "expected-attention")
SCORED = [policy for policy in available() if SCORE[policy]]
WEIGHTS = [0.0, 0.5, 0.5, 0.25, 1.0, 3.7, 1e6, float("nan"), float("inf")]


def test_every_policy_and_parameter_is_covered():
    assert set(reference_select.RULES) == set(SCORE) == set(available())
    policies = (*available(), *decoding_policies())
    assert {name for policy in policies for name in parameters(policy)} == set(CHOICES)


def random_config(rng: random.Random, policy: str, **fixed) -> EvictionConfig:
    if policy == "full":
        return EvictionConfig("full")
    params = {name: rng.choice(CHOICES[name]) for name in parameters(policy)}
    if policy in (*WINDOWLESS, "kvzip") and rng.random() < 0.3:
        params["window"] = 0
    if params.get("window") == params.get("sinks") == 0:
        params["sinks"] = 1
    params |= fixed
    if policy == "kvzip" and not params["window"]:
        del params["pooling"], params["kernel"]
    if params.get("pooling") == "decay":
        del params["kernel"]
    if rng.random() < 0.5:
        return EvictionConfig(
            policy, keep_ratio=rng.choice([0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.9, 1.0]), **params
        )
    last = params.get("window", params.get("take_probe", policy == "tova"))
    fixed_tokens = last + params.get("sinks", 0)
    return EvictionConfig(policy, budget=rng.randint(1, 20) + fixed_tokens, **params)


def budget_of(cfg: EvictionConfig, n: int) -> int:
    return n if cfg.policy == "full" else reference.budget(n, cfg.budget, cfg.keep_ratio)


def expected(cfg: EvictionConfig, layers: list[Scored], n: int, heads: int) -> list:
    return reference_select.select(cfg.policy, layers, n, budget_of(cfg, n), cfg.params, heads)


def plain(x: LayerScores) -> Scored:
    """The same numbers for the reference's selection."""
    lists = [None if t is None else t.tolist() for t in (x.scores, x.second)]
    return Scored(lists[0], None if x.weight is None else float(x.weight), lists[1])


def as_lists(kept) -> list:
    for layer in kept:
        for head in layer:
            assert head.dtype == torch.int64 and bool((head.diff() > 0).all())
    return [[head.tolist() for head in layer] for layer in kept]


def check_counts(kept: list, cfg: EvictionConfig, n: int) -> None:
    skipped = cfg.params.get("skip_layers", 0)
    assert all(len(head) == n for layer in kept[:skipped] for head in layer)
    heads = [head for layer in kept[skipped:] for head in layer]
    assert sum(map(len, heads)) == len(heads) * cfg.budget_for(n)
    if cfg.evicts(n):
        window, sinks = reference.always_kept(cfg.policy, budget_of(cfg, n), cfg.params)
        fixed = {*range(sinks), *range(n - window, n)}
        assert all(fixed <= set(head) and head[0] >= 0 and head[-1] < n for head in heads)


def slack(policy: str) -> float:
    """Absolute error: cosines have one however small they are, and so has what is compared with a mean."""
    return {"keydiff": 1e-6, "compactor": 1e-4, "dropkv": 1e-7}.get(policy, 1e-9)


def relative(policy: str) -> float:
    """Relative error: shares of exponentials of large numbers have a larger one, and so have distances."""
    return 1e-4 if policy in ("expected-attention", "dropkv") else 1e-5


def near(x: float, cut: float, policy: str) -> bool:
    return abs(x - cut) <= relative(policy) * abs(cut) + slack(policy)


def check_same(kept: list, wanted: list, layers: list[Scored], cfg: EvictionConfig) -> None:
    """Equal counts, and sets that differ only by entries within 1e-5 relative of the cut."""
    for layer_kept, layer_wanted, x in zip(kept, wanted, layers, strict=True):
        assert [len(h) for h in layer_kept] == [len(h) for h in layer_wanted]
        for head, (have, want) in enumerate(zip(layer_kept, layer_wanted, strict=True)):
            if have == want:
                continue
            row = x.scores[head] if x.second is None else x.second[head]
            past = [i for i in want if i < len(row)]
            if x.second is not None:
                values = sorted(x.scores[head], reverse=True)
                sure = int(cfg.params["first"] * len(past) + 1e-9)
                if 0 < sure < len(values) and near(values[sure], values[sure - 1], cfg.policy):
                    continue  # a near-tie of the first stage moves what the second sees
                past = [i for i in past if x.scores[head][i] < values[sure - 1]] if sure else past
            cut = min(row[i] for i in past)
            assert all(near(row[i], cut, cfg.policy) for i in set(have) ^ set(want))


def check_scores(fast: LayerScores, slow: Scored, policy: str) -> bool:
    """Scores, weight and second equal the reference's; False if a token is at the limit of being lifted."""
    have, wanted = np.array(fast.scores.tolist()), np.array(slow.scores)
    assert fast.scores.dtype == torch.float32 and have.shape == wanted.shape
    sure = np.ones_like(wanted, bool) if slow.lift_margin is None else np.array(slow.lift_margin) > 1e-5
    np.testing.assert_allclose(have[sure], wanted[sure], rtol=relative(policy), atol=slack(policy))
    if policy in reference_select.DYNAMIC:
        np.testing.assert_allclose(float(fast.weight), slow.weight, rtol=1e-4, atol=1e-7)
    if slow.second is not None:
        np.testing.assert_allclose(fast.second.tolist(), slow.second, rtol=1e-5, atol=slack(policy))
    return bool(sure.all())


def random_turns(rng: random.Random, n: int, size: int) -> tuple[Turns, Rotary]:
    """A rotary embedding, all or part of the head size, told for n positions or for more."""
    pairs = rng.choice([1, size // 2])
    turns = Turns(0.7 ** np.arange(pairs), rng.choice([1.0, 1.3]), rng.random() < 0.5)
    angles = np.arange(n + rng.choice([0, 0, 5, 600]))[:, None] * turns.speeds
    cos, sin = (torch.tensor(f(angles) * turns.factor) for f in (np.cos, np.sin))
    return turns, Rotary(cos, sin, turns.interleaved)


def random_layer(
    rng: random.Random, cfg: EvictionConfig, n: int, shape: tuple, dtype: torch.dtype, earlier: tuple = ()
):
    """Inputs of one layer, and what the reference makes of them where anything is evicted.

    earlier: how many keys each KV head holds already, where a part of a prompt is evicted.
    """
    heads, group, size, scale, cap = shape
    g = torch.Generator().manual_seed(rng.randrange(2**30))

    def tensor(*dims: int) -> torch.Tensor:
        return (torch.randn(*dims, generator=g) * 2).to(dtype)

    window = cfg.params.get("window", cfg.params.get("take_probe", int(cfg.policy == "tova")))
    q = tensor(heads * group, min(n, window + rng.choice([0, 3])), size)
    k, v, w_o = (
        tensor(heads, n, size),
        tensor(heads, n, size),
        tensor(heads * group, size, 5 if n < 1000 else 300),
    )
    q_all = tensor(heads * group, n, size) if cfg.policy in READ_ALL_QUERIES else None
    # As small as what the window's queries pay to most tokens, so that both count.
    repeated = torch.rand(heads, n, generator=g) / 10 if cfg.policy == "kvzip" else None
    before, begins = [tensor(count, size) for count in earlier], 2 * max(earlier, default=0)
    turns, rotary = random_turns(rng, begins + n, size)
    inputs = LayerInputs(
        None if cfg.policy in WINDOWLESS else q,
        k,
        v,
        scale=scale,
        logit_softcap=cap,
        q_all=q_all,
        w_o=w_o,
        repeated=repeated,
        rotary=rotary,
        earlier_keys=before or None,
        begins=begins,
    )
    score = SCORE[cfg.policy]
    b = budget_of(cfg, n)
    if score is None or n <= b:
        return inputs, Scored(None)
    arrays = [None if x is None else x.double().numpy() for x in (k, q, v, q_all, w_o, repeated)]
    window, _ = reference.always_kept(cfg.policy, b, cfg.params)
    seen = [keys.double().numpy() for keys in before] or None
    return inputs, score(Tensors(*arrays, scale, cap, turns, seen, begins), window, b - window, cfg.params)


def run_case(rng: random.Random, cfg: EvictionConfig, n: int, dtype: torch.dtype, layers: int = 0) -> None:
    heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    num_layers = layers or rng.randint(1, 3)
    shape = (heads, group, rng.choice([4, 6]), rng.choice([None, 0.7]), rng.choice([None, None, 2.0]))
    layers = [random_layer(rng, cfg, n, shape, dtype) for _ in range(num_layers)]
    check_stages(cfg, n, *check_model(cfg, layers, n, heads))


def check_model(
    cfg: EvictionConfig, layers: list[tuple[LayerInputs, Scored]], n: int, heads: int
) -> tuple[list[LayerScores], list]:
    """Scores of all layers, and what is kept, once both equal what the reference makes of the layers."""
    inputs, slow = zip(*layers, strict=True)
    fast = [score_layer(cfg, x, i, len(layers)) for i, x in enumerate(inputs)]
    kept = as_lists(select(cfg, fast, n))
    check_counts(kept, cfg, n)
    assert kept == expected(cfg, [plain(x) for x in fast], n, heads)
    if slow[0].scores is not None:
        sure = [check_scores(x, y, cfg.policy) for x, y in zip(fast, slow, strict=True)]
        # The weights of the fast code, lest their last digit decide where a rounded share goes.
        same = [dataclasses.replace(y, weight=plain(x).weight) for x, y in zip(fast, slow, strict=True)]
        if all(sure):
            check_same(kept, expected(cfg, same, n, heads), slow, cfg)
    return fast, kept


def check_stages(cfg: EvictionConfig, n: int, layers: list[LayerScores], kept: list) -> None:
    """One layer at a time, as in a layer's own forward, and several, as in a pipeline stage."""
    is_global = reference_select.RULES[cfg.policy][0] == "global"
    is_dynamic = cfg.policy in reference_select.DYNAMIC and cfg.evicts(n)
    if len(layers) > 1 and cfg.evicts(n) and (is_global or is_dynamic):
        with pytest.raises(ValueError, match="layer"):
            select(cfg, layers[1:], n)
    if is_global:
        return
    if is_dynamic:
        weights = [float(x.weight) for x in layers]
        budgets = layer_budgets(cfg, weights, n)
        b = budget_of(cfg, n)
        window, _ = reference.always_kept(cfg.policy, b, cfg.params)
        assert budgets == reference.dynamic(weights, b - window, n - window)
        layers = [dataclasses.replace(x, budget=y) for x, y in zip(layers, budgets, strict=True)]
    leader = take.warmup_layers(cfg, len(layers)) - 1 if cfg.policy == "take" and cfg.evicts(n) else 0
    for x, wanted in zip(layers, kept, strict=True):
        given = [x] if x.layer >= leader else [x, layers[leader]]
        assert as_lists(select(cfg, given, n))[0] == wanted
    if leader > 0:
        with pytest.raises(ValueError, match=f"layer {leader} chooses"):
            select(cfg, layers[:leader], n)
    else:
        assert as_lists(select(cfg, layers[1:], n)) == kept[1:]


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 120, 20))])
@pytest.mark.parametrize("policy", available())
def test_random_shapes(policy, first):
    for seed in range(first, first + 20):
        rng = random.Random(f"{policy}{seed}")
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        with named(seed):
            run_case(rng, random_config(rng, policy), rng.randint(1, 80), dtype)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 19, 20, 21, 22, 70])
@pytest.mark.parametrize("policy", [p for p in available() if p != "full"])
def test_lengths_around_window_and_budget(policy, n):
    sizes = those_of(policy, window=8, take_probe=8, sinks=0)
    if policy.endswith(
        "defensivekv"
    ):  # an average of all candidates would be the same for each but for its rounding
        sizes |= {"kernel": 5}
    run_case(random.Random(n), EvictionConfig(policy, budget=20, **sizes), n, torch.float32)
    run_case(random.Random(n), EvictionConfig(policy, keep_ratio=0.25, **sizes), n, torch.float32)


@pytest.mark.parametrize("policy", [policy for policy in SCORED if "pooling" in parameters(policy)])
def test_decay_is_offered_where_no_score_is_negative(policy):
    """A negative score would grow with the distance."""
    for seed in range(20):
        rng = random.Random(f"{policy}{seed}")
        cfg = random_config(rng, policy, pooling="decay", window=5)
        inputs, _ = random_layer(rng, cfg, 60, (2, 3, 4, None, None), torch.float32)
        scores = score_layer(cfg, inputs, 0, 1).scores
        assert scores is None or (float(scores.min()) >= 0 and float(scores.max()) > 0)
    run_case(
        random.Random(1),
        random_config(random.Random(2), policy, pooling="decay", window=5),
        300,
        torch.float32,
    )


@pytest.mark.long
@pytest.mark.parametrize("policy", SCORED)
def test_long_prompts(policy):
    """Longer than what the fast code may take in one piece."""
    # The reference is slow.
    sizes = those_of(policy, window=4, take_probe=4, sinks=0)
    for ratio in (0.03, 0.4):
        cfg = EvictionConfig(policy, keep_ratio=ratio, **sizes)
        run_case(random.Random(3), cfg, 1300, torch.bfloat16, layers=2)


@pytest.mark.parametrize("policy", ["vatp-snapkv", "kvzip"])
@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.3])
def test_sinks_and_window_that_use_up_a_ratio(policy, ratio):
    cfg = EvictionConfig(policy, keep_ratio=ratio, window=8, sinks=4)
    for n in range(1, 50):
        run_case(random.Random(n), cfg, n, torch.float32, layers=1)


def given_layers(
    rng: random.Random, cfg: EvictionConfig, values: list[float], n: int, heads: int, num_layers: int
) -> list[LayerScores]:
    m = n - reference.always_kept(cfg.policy, budget_of(cfg, n), cfg.params)[0]

    def scores() -> torch.Tensor:
        return torch.tensor(rng.choices(values, k=heads * m)).view(heads, m)

    layers = [LayerScores(i, num_layers, heads, scores()) for i in range(num_layers)]
    if cfg.policy in reference_select.DYNAMIC:
        layers = [dataclasses.replace(x, weight=rng.choice(WEIGHTS)) for x in layers]
    if "first" in cfg.params:
        layers = [dataclasses.replace(x, second=scores()) for x in layers]
    return layers


@pytest.mark.parametrize("policy", SCORED)
def test_selection_from_given_scores_with_many_ties(policy):
    """Scores from a handful of values: nearly every cut falls among equals."""
    for seed in range(50):
        rng = random.Random(f"{policy}{seed}")
        heads, num_layers, n = rng.choice([1, 2, 4]), rng.choice([1, 3, 6]), rng.randint(30, 100)
        cfg = random_config(rng, policy)
        if not cfg.evicts(n):
            continue
        values = [[0.0, -0.0, 0.25, 0.5, 1e-38, -1.0], [0.5]][rng.random() < 0.2]
        layers = given_layers(rng, cfg, values, n, heads, num_layers)
        wanted = expected(cfg, [plain(x) for x in layers], n, heads)
        order = list(range(num_layers))
        rng.shuffle(order)
        assert as_lists(select(cfg, [layers[i] for i in order], n)) == [wanted[i] for i in order]
        check_counts(wanted, cfg, n)
        check_stages(cfg, n, layers, wanted)
