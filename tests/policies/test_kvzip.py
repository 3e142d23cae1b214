"""What kvzip counts of a repeat, against plain loops in float64; and what it keeps by that."""

import numpy as np
import pytest
import torch

from vllm_kvevict.policies.kvzip import repeat_attention

from .reference_scores import attention_row

HEADS, GROUP, SIZE = 2, 3, 6


def tensors(rows: int, seen: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of a repeat's rows; keys of what they see, and their own."""
    g = torch.Generator().manual_seed(rows * 100 + seen)
    query = torch.randn(HEADS * GROUP, rows, SIZE, generator=g) * 2
    return query.to(dtype), torch.randn(HEADS, seen + rows, SIZE, generator=g).to(dtype)


def reference(query: torch.Tensor, keys: torch.Tensor, chunk: slice, scale: float, cap: float | None) -> list:
    """For each KV head and token of the chunk, the most over the rows of the head's queries."""
    q, k = query.double().numpy(), keys.double().numpy()
    rows, total = q.shape[1], k.shape[1]
    most = np.zeros((HEADS, chunk.stop - chunk.start))
    for head in range(HEADS * GROUP):
        for row in range(rows):
            visible = k[head // GROUP, : total - rows + row + 1]
            received = attention_row(q[head, row], visible, scale, cap)[chunk]
            most[head // GROUP] = np.maximum(most[head // GROUP], received)
    return most.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("rows", "seen", "sinks"), [(1, 1, 0), (9, 30, 4), (40, 32, 0), (5, 2, 1)])
def test_the_most_that_a_token_receives(rows, seen, sinks, cap, dtype):
    query, keys = tensors(rows, seen, dtype)
    chunk = slice(sinks, seen)
    most = repeat_attention(query, keys, chunk, 0.7, cap)
    assert most.dtype == torch.float32
    torch.testing.assert_close(
        most, torch.tensor(reference(query, keys, chunk, 0.7, cap)), rtol=1e-5, atol=1e-7
    )
