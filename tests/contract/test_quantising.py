"""Entries in 8 bits have the bytes that vLLM's own writer would give them, once their keys are rotated as its int4 are.

Without a GPU vLLM takes Triton to be missing: its writer is copied from its source, and interpreted.
"""

import ast
import runpy

import pytest
import torch

from tests.contract import source
from tests.interpreting import interpreted
from vllm_kvevict.kernels.quantise import quantise_reference, rotate

OPS = "vllm.v1.attention.ops"


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 256])
def test_keys_are_rotated_as_vllm_does(head_dim):
    theirs = pytest.importorskip(f"{OPS}.int4_per_token_head").single_rht
    x = torch.randn(20, 2, head_dim)
    expected = theirs(x) / (head_dim & -head_dim) ** 0.5
    torch.testing.assert_close(rotate(x), expected, atol=2e-6, rtol=0)
    assert (rotate(x.flip(-1)) - expected).abs().max() > 0.1


@pytest.mark.parametrize("head_dim", [32, 64])
def test_bytes_are_those_of_vllms_writer(tmp_path, head_dim):
    name, tree = "_reshape_cache_per_token_head", source.tree(f"{OPS}.triton_reshape_and_cache_flash")
    found = [ast.unparse(node) for node in tree.body if getattr(node, "name", "") == name]
    (tmp_path / "copy.py").write_text("\n".join(["import triton", "import triton.language as tl", *found]))
    writer = runpy.run_path(str(tmp_path / "copy.py"))[name]
    x = torch.randn(6, 2, head_dim) * 10 ** (4 * torch.rand(6, 2, 1) - 2)
    x[:2], x[1, :, :5] = 0, torch.tensor([127, 0.5, -1.5, 126.5, -2.5])
    key, value = rotate(x), x
    numbers, scales = torch.zeros(2, 2, 4, 2, head_dim, dtype=torch.int8), torch.zeros(2, 2, 4, 2)
    strides = 2 * key.stride()[:2] + 2 * numbers[0].stride()[:3] + 2 * scales[0].stride()
    with interpreted():
        writer[(6, 2)](
            *(key, value, *numbers, *scales, torch.arange(6), *strides, 4, head_dim, head_dim, head_dim),
            IS_INT_QUANT=True,
        )
    for found, found_scales, is_key in zip(numbers, scales, (True, False), strict=True):
        expected = quantise_reference(x, is_key)
        assert torch.equal(found.flatten(0, 1)[:6], expected.numbers)
        assert torch.equal(found_scales.flatten(0, 1)[:6], expected.scales)
