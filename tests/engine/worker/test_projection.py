"""Output projections are read where they are: no copy stays, and new weights count at once."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from tests.engine.support.running import evicting_engine
from vllm_kvevict.engine.worker.runtime import get_runtime

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm(models):
    with evicting_engine(models("llama")) as llm:
        yield llm


@pytest.fixture
def linear(llm):
    """The projection of layer 1, put back afterwards."""
    linear = get_runtime().rank.projections._found[1]
    before = linear.weight, linear.cpu_linear
    yield linear
    linear.weight, linear.cpu_linear = before


def set_weight(linear, weight: Tensor, packed: bool) -> None:
    """Give a layer other weights, as vLLM does when it loads them."""
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    linear.cpu_linear = functional.linear
    if packed:
        dispatch_cpu_unquantized_gemm(linear, remove_weight=True)


@pytest.mark.parametrize("packed", [False, True])
def test_the_weights_are_read_anew(linear, packed):
    projections = get_runtime().rank.projections
    heads, size = projections.attentions[1].num_heads, projections.attentions[1].head_size
    for seed in (0, 1):
        weight = torch.randn(128, heads * size, generator=torch.Generator().manual_seed(seed))
        set_weight(linear, weight, packed)
        assert torch.equal(projections.of(1), weight.t().reshape(heads, size, 128))


def test_plain_weights_are_not_copied(linear):
    set_weight(linear, torch.randn(128, 128), packed=False)
    view = get_runtime().rank.projections.of(1)
    assert view.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()


def test_packed_weights_are_unpacked_for_one_use(linear):
    set_weight(linear, torch.randn(128, 128), packed=True)
    unpacked = weakref.ref(get_runtime().rank.projections.of(1).untyped_storage())
    assert unpacked() is None
