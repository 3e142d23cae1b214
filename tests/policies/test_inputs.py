"""Tensors in: what is required, which shapes fit, which dtypes and layouts give the same answer."""

import subprocess
import sys

import pytest
import torch

from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, decide, score_layer, select
from vllm_kvevict.policies.registry import Policy, register

CFG = EvictionConfig("snapkv", budget=20, window=8)


def tensors(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    return torch.randn(4, 8, 6, generator=g), torch.randn(2, n, 6, generator=g)


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


@pytest.mark.parametrize("layer", [-1, 4])
def test_layer_out_of_range(layer):
    with pytest.raises(ValueError, match="layer must be in"):
        score_layer(CFG, LayerInputs(*tensors()), layer, 4)


@pytest.mark.parametrize("scores", [None, torch.rand(2, 41), torch.rand(3, 42)])
def test_scores_that_do_not_fit(scores):
    with pytest.raises(ValueError, match=r"scores of layer 0 must be \[2, 42\]"):
        select(CFG, [LayerScores(0, 1, 2, scores)], 50)


def test_layers_of_different_length():
    with pytest.raises(ValueError, match="keys"):
        decide(CFG, [LayerInputs(*tensors(50)), LayerInputs(*tensors(51))])


def test_nothing_is_read_when_nothing_is_evicted():
    scores = score_layer(CFG, LayerInputs(None, tensors(20)[1]), 0, 1)
    assert scores.scores is None
    assert [x.tolist() for x in select(CFG, [scores], 20)[0]] == [list(range(20))] * 2
    assert select(CFG, [], 50) == []
    assert decide(CFG, []) == []


def test_kept_indices_are_independent_tensors():
    for cfg, n in ((CFG, 20), (EvictionConfig("streaming-llm", budget=10), 50), (CFG, 50)):
        (heads,) = decide(cfg, [LayerInputs(*tensors(n))])
        second = heads[1].clone()
        heads[0].fill_(-1)
        assert torch.equal(heads[1], second)


def test_more_query_rows_than_the_window():
    q, k = tensors()
    longer = torch.cat((torch.randn(4, 5, 6), q), 1)
    assert torch.equal(
        score_layer(CFG, LayerInputs(longer, k), 0, 1).scores,
        score_layer(CFG, LayerInputs(q, k), 0, 1).scores,
    )


def test_layout_and_grad_do_not_matter():
    q, k = tensors()
    wanted = score_layer(CFG, LayerInputs(q, k), 0, 1).scores
    q = q.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    k = k.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    result = score_layer(CFG, LayerInputs(q, k), 0, 1).scores
    assert not result.requires_grad
    assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_scored_in_fp32(dtype):
    q, k = (x.to(dtype) for x in tensors())
    result = score_layer(CFG, LayerInputs(q, k), 0, 1).scores
    assert result.dtype == torch.float32
    assert torch.equal(result, score_layer(CFG, LayerInputs(q.float(), k.float()), 0, 1).scores)


def test_inputs_are_left_alone():
    q, k = tensors()
    before = q.clone(), k.clone()
    decide(CFG, [LayerInputs(q, k, logit_softcap=5.0)])
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_zero_softcap_is_off():
    q, k = tensors()
    assert torch.equal(
        score_layer(CFG, LayerInputs(q, k, logit_softcap=0.0), 0, 1).scores,
        score_layer(CFG, LayerInputs(q, k), 0, 1).scores,
    )


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="snapkv"):
        register(Policy("snapkv", None, None))


def test_policies_need_torch_alone():
    code = (
        "import sys, vllm_kvevict.policies, vllm_kvevict.parallel;"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'transformers', 'triton')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
