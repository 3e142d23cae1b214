"""Entries in 8 bits have the bytes that vLLM's own writer would give them, once their keys are rotated as its int4 are.

Without a GPU vLLM takes Triton to be missing: its functions are copied from its source, and interpreted.
"""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.contract import source
from tests.interpreting import interpreted
from vllm_kvevict.kernels.quantise import quantise_reference, rotate

OPS = "vllm.v1.attention.ops"


def _copied(folder: Path, module: str, wanted: set[str], head: str) -> ModuleType:
    """A module of some functions and constants of one of vLLM's."""
    tree = source.tree(f"{OPS}.{module}")
    assert tree is not None
    parts = [
        ast.unparse(node)
        for node in tree.body
        if {getattr(node, "name", ""), getattr(getattr(node, "target", None), "id", "")} & wanted
    ]
    assert len(parts) == len(wanted)
    file = folder / f"{module}_copied.py"
    file.write_text("\n\n".join([head, *parts]))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_keys_are_rotated_as_vllm_does(tmp_path, head_dim):
    wanted = {"_RHT_SIGNS_CACHE", "_get_rht_signs", "single_rht", "fast_hadamard_transform"}
    head = (
        "import torch\n"
        "_hadacore_available = lambda: False\n"
        "largest_power_of_2_divisor = lambda n: n & -n\n"
        "_TRITON_HADAMARD_MIN_D = _TRITON_HADAMARD_MAX_D = 0"
    )
    theirs = _copied(tmp_path, "int4_per_token_head", wanted, head).single_rht
    x = torch.randn(20, 2, head_dim)
    expected = theirs(x) / (head_dim & -head_dim) ** 0.5
    torch.testing.assert_close(rotate(x), expected, atol=2e-6, rtol=0)
    assert (rotate(x) - rotate(x.flip(-1))).abs().max() > 0.1


@pytest.mark.parametrize("head_dim", [32, 64])
def test_bytes_are_those_of_vllms_writer(tmp_path, head_dim):
    head = "import triton\nimport triton.language as tl"
    copied = _copied(tmp_path, "triton_reshape_and_cache_flash", {"_reshape_cache_per_token_head"}, head)
    x = torch.randn(6, 2, head_dim) * 10 ** (4 * torch.rand(6, 2, 1) - 2)
    x[0], x[1, :, :4] = 0, torch.tensor([127, 0.5, -1.5, 126.5])
    x[1] = x[1].clamp(-127, 127)
    key, value = rotate(x), x
    caches = [torch.zeros(2, 4, 2, head_dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 4, 2) for _ in range(2)]
    strides = [stride for t in (key, value) for stride in t.stride()[:2]]
    strides += [stride for t in (*caches, *scales) for stride in t.stride()[:3]]
    with interpreted():
        copied._reshape_cache_per_token_head[(6, 2)](
            *(key, value, *caches, *scales, torch.arange(6), *strides, 4, head_dim, head_dim, head_dim),
            IS_INT_QUANT=True,
        )
    for cache, of_cache, is_key in zip(caches, scales, (True, False), strict=True):
        expected = quantise_reference(x, is_key)
        assert torch.equal(cache.flatten(0, 1)[:6], expected.numbers)
        assert torch.equal(of_cache.flatten(0, 1)[:6], expected.scales)
