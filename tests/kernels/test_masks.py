"""Places where masks are true, against torch."""

import pytest
import torch

from vllm_kvevict.kernels.masks import true_places


@pytest.mark.parametrize("shape", [(0,), (1,), (1000,), (7, 33), (3, 4, 5)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_they_are_those_that_torch_finds(shape, share):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    for seen in (mask, mask.transpose(0, -1)):
        expected = seen.flatten().nonzero().flatten()
        found = true_places(seen, len(expected))
        assert found.dtype == torch.int64 and torch.equal(found, expected)
        assert torch.equal(found, torch.nonzero_static(seen.flatten(), size=len(expected)).flatten())
