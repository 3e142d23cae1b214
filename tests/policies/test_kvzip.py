"""What kvzip counts of a repeat, against plain loops in float64; and what it keeps by that."""

import dataclasses

import numpy as np
import pytest
import torch

from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide
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


def test_other_keys_give_other_scores():
    """Scores come from the keys that are cached, not from the rows alone."""
    query, keys = tensors(20, 30)
    changed = keys.clone()
    changed[:, 10] += 1
    before, after = (repeat_attention(query, k, slice(4, 30), 1.0, None) for k in (keys, changed))
    assert (before != after).any(1).all()


def model(n: int, layers: int = 3) -> list[LayerInputs]:
    g = torch.Generator().manual_seed(n)
    keys = torch.empty(HEADS, n, SIZE, device="meta")
    return [LayerInputs(None, keys, repeated=torch.rand(HEADS, n, generator=g)) for _ in range(layers)]


def test_one_budget_for_the_whole_model():
    inputs = model(100)
    cfg = EvictionConfig("kvzip", budget=20)
    kept = decide(cfg, inputs)
    lengths = torch.tensor([[len(head) for head in layer] for layer in kept])
    assert lengths.sum() == 3 * HEADS * 20 and len(lengths.unique()) > 1
    worst_kept = min(
        float(x.repeated[h, p])
        for x, layer in zip(inputs, kept, strict=True)
        for h, head in enumerate(layer)
        for p in head.tolist()
        if p >= 4
    )
    best_gone = max(
        float(x.repeated[h, p])
        for x, layer in zip(inputs, kept, strict=True)
        for h, head in enumerate(layer)
        for p in set(range(4, 100)) - set(head.tolist())
    )
    assert worst_kept > best_gone
    assert all(head[:4].tolist() == [0, 1, 2, 3] for layer in kept for head in layer)


def test_a_head_may_keep_nothing_but_the_sinks():
    inputs = model(100)
    quiet = dataclasses.replace(inputs[1], repeated=torch.zeros(HEADS, 100))
    kept = decide(EvictionConfig("kvzip", budget=20), [inputs[0], quiet, inputs[2]])
    assert [head.tolist() for head in kept[1]] == [[0, 1, 2, 3]] * HEADS


@pytest.mark.parametrize("params", [{"sinks": 0, "window": 0}, {"kvzip_chunk": 63}, {"kvzip_sees": "some"}])
def test_parameters_that_cannot_be(params):
    with pytest.raises(ValueError, match=" and ".join(list(params)[:2])):
        EvictionConfig("kvzip", keep_ratio=0.2, **params)
