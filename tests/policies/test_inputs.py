"""Tensors in: what is required, which shapes fit, which dtypes and layouts give the same answer."""

import dataclasses

import pytest
import torch

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    Rotary,
    available,
    decide,
    inputs,
    score_layer,
    select,
)
from vllm_kvevict.policies.registry import lookup

from .layers import model_inputs, those_of
from .reference_scores import SCORE

CFG = EvictionConfig("snapkv", budget=20, window=8)
SCORED = [policy for policy in available() if SCORE[policy]]
TENSORS = ("q_window", "keys", "values", "q_all", "w_o")


def tensors(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    return torch.randn(4, 8, 6, generator=g), torch.randn(2, n, 6, generator=g)


def config(policy: str) -> EvictionConfig:
    return EvictionConfig(policy, budget=20, **those_of(policy, window=8, take_probe=8, sinks=2))


def everything() -> LayerInputs:
    (layer,) = model_inputs(1, 1, 2, 2, 50, 6, window=8)
    return layer


def rotary(positions: int = 50, pairs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions)[:, None] * 0.5 ** torch.arange(pairs)
    return angles.cos(), angles.sin()


SUMS = ("col_sums", "tile_sums", "query_moments")
"""What follows from all queries, which policies take as well."""


def needed(policy: str) -> set[str]:
    """The fields that the policy names, with the queries for what follows from them."""
    return {"q_all" if name in SUMS else name for name in config(policy).needs}


def equal_scores(policy: str, x: LayerInputs, y: LayerInputs) -> bool:
    a, b = (score_layer(config(policy), inputs, 0, 1) for inputs in (x, y))
    return all(
        s is t is None or torch.equal(torch.as_tensor(s), torch.as_tensor(t))
        for s, t in ((a.scores, b.scores), (a.second, b.second), (a.weight, b.weight))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k: LayerInputs(None, k), ["q_window", "required"]),
        (lambda q, k: LayerInputs(q[:3], k), ["q_window", "[3, 8, 6]", "multiple"]),
        (lambda q, k: LayerInputs(q[:0], k), ["q_window", "[0, 8, 6]"]),
        (lambda q, k: LayerInputs(q[:, :7], k), ["q_window", "8 rows", "7"]),
        (lambda q, k: LayerInputs(q[..., :5], k), ["q_window", "[4, 8, 5]"]),
        (lambda q, k: LayerInputs(q[0], k), ["q_window", "[8, 6]"]),
        (lambda q, k: LayerInputs(q, k[0]), ["keys", "[50, 6]"]),
        (lambda q, k: LayerInputs(q, None), ["keys", "None"]),
        (lambda q, k: LayerInputs(q, k, scale=float("nan")), ["scale", "nan"]),
        (lambda q, k: LayerInputs(q, k, logit_softcap=-1.0), ["logit_softcap", "-1.0"]),
    ],
)
def test_unusable_inputs_are_named(change, words):
    with pytest.raises(ValueError) as caught:
        score_layer(CFG, change(*tensors()), 0, 1)
    assert all(word in str(caught.value) for word in words)


NEEDS = {
    "": ("streaming-llm", "knorm", "keydiff"),
    "q_window": ("snapkv", "pyramidkv", "ada-snapkv", "ada-pyramid", "cake", "tova", "take"),
    "q_window values": ("lava", "lava-uniform", "lava-pyramid", "lava-uniform-head", "vatp-snapkv", "dropkv"),
    "q_window values w_o": ("criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv"),
    "col_sums": ("h2o",),
    "q_window repeated": ("kvzip",),
    "rotary tile_sums": ("compactor",),
    "values rotary query_moments": ("expected-attention",),
}


@pytest.mark.parametrize("policy", [p for p in available() if p != "full"])
def test_a_policy_reads_what_it_says(policy):
    cfg, x = config(policy), everything()
    assert cfg.needs == next(set(names.split()) for names, policies in NEEDS.items() if policy in policies)
    unread = {name: None for name in (*TENSORS, "rotary") if name not in needed(policy) | {"keys"}}
    assert equal_scores(policy, dataclasses.replace(x, **unread), x)
    for name in needed(policy):
        missing = next(x for x in cfg.needs if x in SUMS) if name == "q_all" else name
        with pytest.raises(ValueError, match=missing):
            score_layer(cfg, dataclasses.replace(x, **{name: None}), 0, 1)
    assert EvictionConfig("full").needs == frozenset()
    assert EvictionConfig("kvzip", budget=20).needs == {"repeated"}


@pytest.mark.parametrize(
    ("policy", "name", "change"),
    [
        (policy, name, change)
        for policy in SCORED
        for name, changes in {
            "q_window": (lambda x: x[:3], lambda x: x[..., :5], lambda x: x[0]),
            "values": (lambda x: x[:, 1:], lambda x: x[:1], lambda x: x[0]),
            "w_o": (lambda x: x[:3], lambda x: x[:, :5], lambda x: x[0], lambda x: x[:0]),
            "q_all": (lambda x: x[:3], lambda x: x[:, 1:], lambda x: x[..., :5], lambda x: x[0]),
            "repeated": (lambda x: x[:1], lambda x: x[:, 1:], lambda x: x[0], lambda x: x.double()),
            "rotary": (
                lambda x: rotary(49),
                lambda x: rotary(pairs=4),
                lambda x: rotary(pairs=0),
                lambda x: (x[0], x[1][:, :2]),
                lambda x: (x[0][0], x[1][0]),
            ),
        }.items()
        if name in needed(policy)
        for change in changes
    ],
)
def test_wrong_shapes_are_named(policy, name, change):
    x = everything()
    wrong = dataclasses.replace(x, **{name: change(getattr(x, name))})
    with pytest.raises(ValueError, match=name):
        score_layer(config(policy), wrong, 0, 1)


def test_sums_of_tiles_stand_for_the_queries_of_all_tokens():
    """Also where they were not added up in this order."""
    x = everything()
    turned = x.q_all[:, 2:].double()
    before = Rotary(*(table.double() for table in rotary())).undo(turned, 2)
    extended = torch.cat((torch.ones(4, 48, 1), before), 2)
    keys = x.keys.repeat_interleave(2, 0)
    given = {
        "compactor": {"tile_sums": (x.q_all @ keys.mT).double().softmax(-1).sum(1).float()},
        "expected-attention": {"query_moments": (extended.mT @ extended).float()},
    }
    for policy, sums in given.items():
        other = dataclasses.replace(x, q_all=None, **sums)
        found, wanted = (score_layer(config(policy), y, 0, 1).scores for y in (other, x))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_rotary_of_positions_beyond_the_table():
    cos, sin = (table.double() for table in rotary(700))
    turned = Rotary(cos, sin).mean(150, 500, 8)
    for positions in (40, 149, 150, 151, 400):
        shorter = Rotary(1.5 * cos[:positions], 1.5 * sin[:positions])
        torch.testing.assert_close(shorter.mean(150, 500, 8), _times(turned, 1.5))


def _times(matrix: torch.Tensor, factor: float) -> torch.Tensor:
    """The dimensions that are turned, by a factor."""
    return torch.cat((matrix[:6] * factor, matrix[6:]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_rotary_turns_it_also_undoes(interleaved):
    cos, sin = (1.2 * table.double() for table in rotary())
    once = Rotary(cos, sin, interleaved)
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    turned = torch.stack([x[:, i] @ once.mean(5 + i, 1, 8).T for i in range(20)], 1)
    torch.testing.assert_close(once.undo(turned, 5), x)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(once.undo(turned, 4), x)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(Rotary(cos, sin, not interleaved).undo(turned, 5), x)


@pytest.mark.parametrize("norm", ["sum", "mean"])
def test_column_sums_stand_for_the_queries_of_all_tokens(norm):
    x = everything()
    keys = x.keys.repeat_interleave(2, 0)
    logits = (x.q_all @ keys.mT / 6**0.5).masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf)
    sums = logits.double().softmax(-1).sum(1).float()
    cfg = EvictionConfig("h2o", budget=20, window=8, h2o_norm=norm)
    given = score_layer(cfg, LayerInputs(None, x.keys, col_sums=sums), 0, 1).scores
    torch.testing.assert_close(given, score_layer(cfg, x, 0, 1).scores)
    head_means = sums.view(2, 2, 50).mean(1)[:, :42]
    torch.testing.assert_close(given, head_means / torch.arange(50, 8, -1) if norm == "mean" else head_means)


@pytest.mark.parametrize("layer", [-1, 4])
def test_layer_out_of_range(layer):
    with pytest.raises(ValueError, match="layer must be in"):
        score_layer(CFG, LayerInputs(*tensors()), layer, 4)


@pytest.mark.parametrize("scores", [None, torch.rand(2, 41), torch.rand(3, 42)])
def test_scores_that_do_not_fit(scores):
    with pytest.raises(ValueError, match=r"scores of layer 0 must be \[2, 42\]"):
        select(CFG, [LayerScores(0, 1, 2, scores)], 50)
    with pytest.raises(ValueError, match=r"second.* \[2, 42\]"):
        select(config("criticalkv"), [LayerScores(0, 1, 2, torch.rand(2, 42), second=scores)], 50)


@pytest.mark.parametrize("policy", ["lava", "lava-uniform-head", "cake"])
def test_weights_are_required_where_layers_share(policy):
    with pytest.raises(ValueError, match="weight"):
        select(config(policy), [LayerScores(0, 1, 2, torch.rand(2, 42))], 50)
    kept = select(config(policy), [LayerScores(3, 9, 2, torch.rand(2, 42), budget=5)], 50)
    assert sum(map(len, kept[0])) == 26


def test_nothing_is_read_when_nothing_is_evicted():
    scores = score_layer(CFG, LayerInputs(None, tensors(20)[1]), 0, 1)
    assert scores.scores is None
    assert [x.tolist() for x in select(CFG, [scores], 20)[0]] == [list(range(20))] * 2
    assert select(CFG, [], 50) == []
    assert decide(CFG, []) == []


@pytest.mark.parametrize("policy", SCORED)
def test_layout_and_grad_do_not_matter(policy):
    x = everything()
    changed = {
        name: getattr(x, name).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for name in TENSORS
    }
    y = dataclasses.replace(x, **changed)
    result = score_layer(config(policy), y, 0, 1)
    assert not result.scores.requires_grad
    assert equal_scores(policy, x, y)


@pytest.mark.parametrize("policy", SCORED)
def test_inputs_are_left_alone(policy):
    x = dataclasses.replace(everything(), logit_softcap=5.0)
    before = {name: getattr(x, name).clone() for name in TENSORS}
    (scores,) = [score_layer(config(policy), x, 0, 1)]
    tables = [t.clone() for t in (scores.scores, scores.second) if t is not None]
    select(config(policy), [scores], 50)
    assert all(torch.equal(getattr(x, name), old) for name, old in before.items())
    after = [t for t in (scores.scores, scores.second) if t is not None]
    assert all(torch.equal(s, t) for s, t in zip(tables, after, strict=True))


def test_inputs_may_be_given_by_their_names() -> None:
    policy = dataclasses.replace(lookup("snapkv"), needs=("q_window", inputs.VALUES))
    assert policy.needs == (inputs.Q_WINDOW, inputs.VALUES)
    with pytest.raises(ValueError, match=r"there is no input 'queries' .choose from q_window, values"):
        dataclasses.replace(policy, window_needs=("queries",))
