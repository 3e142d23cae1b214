"""Rows of different lengths against the slow reference, which sees every row alone."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    decide,
    decoding_policies,
    parameters,
    score_layer,
    select,
)

from . import reference_rows
from .reference_rows import SCORE
from .reference_scores import Tensors
from .seeds import named
from .test_against_reference import CHOICES

SCORED = [policy for policy in decoding_policies() if SCORE[policy]]


def test_which_policies_evict_answers():
    assert decoding_policies() == ("streaming-llm", "snapkv", "ada-snapkv", "knorm", "keydiff", "rkv")
    assert set(SCORE) == set(decoding_policies()) and "rkv" not in available()


def random_config(rng: random.Random, policy: str) -> EvictionConfig:
    params = {name: rng.choice(CHOICES[name]) for name in parameters(policy)}
    if policy in ("knorm", "keydiff") and rng.random() < 0.3:
        params["window"] = 0
    if params.get("pooling") == "decay":
        del params["kernel"]
    always = params.get("window", 0) + params.get("sinks", 0)
    return EvictionConfig(policy, budget=always + rng.randint(1, 20), **params)


def random_lengths(rng: random.Random, heads: int) -> tuple[list[int], list[int]]:
    """Lengths, which may be equal or as short as the window, and how many entries are pinned."""
    longest = rng.randint(1, 70)
    lengths = [
        rng.choice([longest, rng.randint(0, longest), rng.randint(0, min(longest, 9))]) for _ in range(heads)
    ]
    if rng.random() < 0.2:
        lengths = [longest] * heads
    most = rng.choice([0, 5, 40])
    return lengths, [rng.randint(0, min(length, most)) for length in lengths]


def random_inputs(
    rng: random.Random, cfg: EvictionConfig, lengths: list[int], pinned: list[int]
) -> LayerInputs:
    """A layer with NaN wherever nobody may look."""
    heads, group, size = len(lengths), rng.choice([1, 2, 3]), rng.choice([4, 6])
    g = torch.Generator().manual_seed(rng.randrange(2**30))
    n = max(lengths) + rng.choice([0, 0, 3])
    q = torch.randn(heads * group, cfg.params.get("window", 0) + rng.choice([0, 3]), size, generator=g) * 2
    k = torch.randn(heads, n, size, generator=g) * 2
    for row, length, first in zip(k, lengths, pinned, strict=True):
        row[: n - length + first] = math.nan
    given = (torch.tensor(lengths), torch.tensor(pinned) if any(pinned) or rng.random() < 0.5 else None)
    scale, cap = rng.choice([None, 0.7]), rng.choice([None, None, 2.0])
    return LayerInputs(q, k, scale=scale, logit_softcap=cap, lengths=given[0], pinned=given[1])


def alone(x: LayerInputs, head: int, count: int) -> LayerInputs:
    """The last `count` entries of a row, as a layer with one KV head."""
    queries = x.q_window.unflatten(0, (x.num_kv_heads, -1))[head]
    return LayerInputs(
        queries, x.keys[head : head + 1, x.num_tokens - count :], None, x.scale, x.logit_softcap
    )


def slow_scores(cfg: EvictionConfig, x: LayerInputs, entries: list[int]) -> list[list[float]]:
    """Of every row's own candidates."""
    window, found = cfg.params["window"], []
    for head, count in enumerate(entries):
        one = alone(x, head, count)
        t = Tensors(
            one.keys.double().numpy(), one.q_window.double().numpy(), scale=x.scale, cap=x.logit_softcap
        )
        found.append(SCORE[cfg.policy](t, window, 0, cfg.params).scores[0] if count > window else [])
    return found


def own_columns(scores: torch.Tensor, entries: list[int], window: int) -> list[list[float]]:
    """Of each row the columns of its candidates; all others are -inf."""
    found = []
    for row, count in zip(scores, entries, strict=True):
        start = len(row) - max(0, count - window)
        assert bool((row[:start] == -math.inf).all())
        found.append(row[start:].tolist())
    return found


def as_lists(kept) -> list:
    for head in (head for layer in kept for head in layer):
        assert head.dtype == torch.int64 and bool((head.diff() > 0).all())
    return [[head.tolist() for head in layer] for layer in kept]


def check_kept(cfg: EvictionConfig, kept: list, lengths: list[int], pinned: list[int]) -> None:
    """What holds whatever the scores are."""
    entries = [length - first for length, first in zip(lengths, pinned, strict=True)]
    others = [len(row) - first for row, first in zip(kept, pinned, strict=True)]
    heads, budget = len(kept), cfg.budget
    if cfg.policy == "ada-snapkv":
        assert sum(others) == min(sum(entries), heads * budget)
    else:
        assert others == [min(count, budget) for count in entries]
    for row, length, first in zip(kept, lengths, pinned, strict=True):
        window = min(cfg.params.get("window", 0), length - first)
        assert {*range(first), *range(length - window, length)} <= set(row) <= set(range(length))


def run_case(rng: random.Random, policy: str) -> None:
    cfg = random_config(rng, policy)
    layers = [random_lengths(rng, heads) for heads in [rng.choice([1, 2, 3, 4])] * rng.choice([1, 3])]
    inputs = [random_inputs(rng, cfg, *layer) for layer in layers]
    fast = [score_layer(cfg, x, i, len(layers)) for i, x in enumerate(inputs)]
    kept = as_lists(select(cfg, fast, 0))
    assert kept == as_lists(decide(cfg, inputs))
    for x, scored, found, (lengths, pinned) in zip(inputs, fast, kept, layers, strict=True):
        assert scored.lengths.tolist() == lengths and scored.pinned.tolist() == pinned
        check_kept(cfg, found, lengths, pinned)
        entries = [length - first for length, first in zip(lengths, pinned, strict=True)]
        scores = None
        if scored.scores is not None:
            scores = own_columns(scored.scores, entries, cfg.params["window"])
            check_scores(cfg, x, entries, scores)
        assert found == reference_rows.select(policy, scores, lengths, pinned, cfg.budget, cfg.params)


def check_scores(cfg: EvictionConfig, x: LayerInputs, entries: list[int], scores: list[list[float]]) -> None:
    """Each row's are those of the row alone, bit for bit, and the reference's."""
    for head, (row, wanted) in enumerate(zip(scores, slow_scores(cfg, x, entries), strict=True)):
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6 if cfg.policy == "keydiff" else 2e-7)
        if row:
            one = EvictionConfig(cfg.policy, budget=cfg.params["window"] + 1, **cfg.params)
            by_itself = score_layer(one, alone(x, head, entries[head]), 0, 1).scores
            assert by_itself is None or by_itself[0].tolist() == row


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(40, 400, 40))])
@pytest.mark.parametrize("policy", decoding_policies())
def test_rows_are_scored_alone_and_chosen_together(policy, first):
    for seed in range(first, first + 40):
        with named(seed):
            run_case(random.Random(f"{policy}{seed}"), policy)


def given_scores(rng: random.Random, lengths: list[int], pinned: list[int], window: int) -> LayerScores:
    """A layer whose scores are mostly equal, some of them NaN or without an end."""
    caps = [max(0, length - first - window) for length, first in zip(lengths, pinned, strict=True)]
    values = rng.choice(
        [[0.0, -0.0, 0.5], [-math.inf, 0.25], [math.nan, -math.inf], [1.0, math.inf, math.nan], [0.5]]
    )
    scores = torch.full((len(caps), max(caps)), -math.inf)
    for row, cap in zip(scores, caps, strict=True):
        row[len(row) - cap :] = torch.tensor(rng.choices(values, k=cap))
    return LayerScores(0, 1, len(caps), scores, lengths=torch.tensor(lengths), pinned=torch.tensor(pinned))


def run_given(rng: random.Random, policy: str) -> None:
    cfg = random_config(rng, policy)
    lengths, pinned = random_lengths(rng, rng.choice([1, 2, 4, 8]))
    window = cfg.params["window"]
    x = given_scores(rng, lengths, pinned, window)
    entries = [length - first for length, first in zip(lengths, pinned, strict=True)]
    (kept,) = as_lists(select(cfg, [x], 0))
    check_kept(cfg, kept, lengths, pinned)
    scores = own_columns(x.scores, entries, window)
    # NaN is the lowest score, which -inf is as well: they tie.
    scores = [[-math.inf if math.isnan(s) else s for s in row] for row in scores]
    assert kept == reference_rows.select(policy, scores, lengths, pinned, cfg.budget, cfg.params)


@pytest.mark.parametrize("policy", SCORED)
def test_ties_and_what_is_no_number(policy):
    for seed in range(100):
        with named(seed):
            run_given(random.Random(f"{policy}{seed}"), policy)


@pytest.mark.parametrize("policy", decoding_policies())
def test_full_rows_are_what_calls_without_lengths_mean(policy):
    for seed in range(20):
        rng = random.Random(f"{policy}{seed}")
        cfg = random_config(rng, policy)
        cfg = EvictionConfig(
            policy,
            budget=cfg.budget,
            **(cfg.params | {"skip_layers": 0} if policy == "knorm" else cfg.params),
        )
        x = random_inputs(rng, cfg, [60, 60], [0, 0])
        x = dataclasses.replace(x, keys=x.keys[:, -60:].contiguous(), lengths=None, pinned=None)
        whole = score_layer(cfg, x, 0, 1)
        for given in ({"lengths": torch.tensor([60, 60])}, {"pinned": torch.tensor([0, 0])}):
            ragged = score_layer(cfg, dataclasses.replace(x, **given), 0, 1)
            assert whole.lengths is None and whole.pinned is None
            assert whole.scores is ragged.scores is None or torch.equal(whole.scores, ragged.scores)
            assert as_lists(select(cfg, [ragged], 60)) == as_lists(select(cfg, [whole], 60))


def test_layers_whose_attention_is_known_already():
    """window_recent and the like stand at the right end, too."""
    rng = random.Random(1)
    cfg = EvictionConfig("ada-snapkv", budget=12, window=5)
    lengths, pinned = [40, 33, 20], [7, 0, 3]
    x = random_inputs(rng, cfg, lengths, pinned)
    received = torch.rand(x.q_window.shape[0], x.num_tokens - 5)
    given = dataclasses.replace(x, q_window=None, window_recent=received)
    scores = score_layer(cfg, given, 0, 1).scores
    elsewhere = score_layer(cfg, dataclasses.replace(given, keys=given.keys.to("meta")), 0, 1)
    assert torch.equal(elsewhere.scores, scores) and elsewhere.device.type == "cpu"
    for head, count in enumerate([33, 33, 17]):
        mine = received.unflatten(0, (3, -1))[head][:, x.num_tokens - count :]
        one = dataclasses.replace(alone(x, head, count), q_window=None, window_recent=mine.contiguous())
        assert torch.equal(scores[head, 28 - (count - 5) :], score_layer(cfg, one, 0, 1).scores[0])


REFUSED = [
    ({"lengths": torch.tensor([5.0, 5.0])}, "lengths must be int64 [2], not torch.float32 [2]"),
    ({"lengths": [5, 5]}, "lengths must be int64 [2], not [5, 5]"),
    ({"lengths": torch.tensor([5])}, "lengths must be int64 [2]"),
    ({"lengths": torch.tensor([5, 51])}, "lengths must be at most n=50, not 51"),
    ({"lengths": torch.tensor([-1, 5])}, "lengths must be at least 0, not [-1, 5]"),
    ({"pinned": torch.tensor([0, 51])}, "pinned must be at most lengths=[50, 50], not [0, 51]"),
    (
        {"lengths": torch.tensor([50, 9]), "pinned": torch.tensor([0, 10])},
        "pinned must be at most lengths=[50, 9]",
    ),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_impossible_lengths_are_named(given, words):
    x = LayerInputs(torch.zeros(4, 8, 6), torch.zeros(2, 50, 6), **given)
    with pytest.raises(ValueError) as caught:
        score_layer(EvictionConfig("snapkv", budget=20, window=8), x, 0, 1)
    assert words in str(caught.value) and "\n" not in str(caught.value)
