"""take: chunks, averaged queries, budgets, and every chunk's choice against plain loops in float64."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies import reference
from tests.policies.reference_scores import attention_row, pooled
from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide, take


@given(
    n=st.integers(1, 5000),
    size=st.integers(1, 600),
    data=st.data(),
)
def test_chunks_cover_the_prompt_and_end_with_the_probe(n: int, size: int, data: st.DataObject) -> None:
    probe = data.draw(st.integers(1, size))
    found = take.chunks(n, size, probe)
    assert found[0][0] == 0 and found[-1][1] == n
    assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
    lengths = [stop - start for start, stop in found]
    assert all(0 < length <= size for length in lengths) and len(found) == -(-n // size)
    assert lengths[-1] >= min(n, probe)
    # Only the cut before the last chunk may be moved.
    assert all(length == size for length in lengths[:-2])


@pytest.mark.parametrize(("n", "size", "probe"), [(0, 4, 1), (9, 4, 0), (9, 4, 5)])
def test_impossible_chunks(n: int, size: int, probe: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, size={size}, probe={probe}"):
        take.chunks(n, size, probe)


def test_queries_are_averaged_in_fp32() -> None:
    queries = torch.randn(3, 2, 4, 8).bfloat16()
    acc = None
    for q in queries:
        acc = take.ema(acc, q, 0.2)
    a, b, c = queries.float()
    assert acc.dtype == torch.float32
    torch.testing.assert_close(acc, 0.2 * (0.2 * a + 0.8 * b) + 0.8 * c)


@pytest.mark.parametrize(
    ("settings", "n", "layer", "last", "budget"),
    [
        ({"budget": 100}, 1000, 0, False, 250),
        ({"budget": 100}, 1000, 1, False, 250),
        ({"budget": 100}, 1000, 2, False, 100),
        ({"budget": 100}, 1000, 0, True, 100),
        ({"budget": 100}, 10**6, 0, False, 10240),
        ({"budget": 20000}, 10**6, 0, False, 20000),
        ({"budget": 300}, 1000, 0, False, 300),
        ({"budget": 100, "take_warmup_budget": 700}, 1000, 0, False, 700),
        ({"keep_ratio": 0.5, "take_warmup_budget": 400}, 1000, 0, False, 500),
        ({"budget": 100, "take_warmup_layers": 0}, 1000, 0, False, 100),
        ({"budget": 100, "take_warmup_layers": 4}, 1000, 3, False, 250),
    ],
)
def test_budgets(settings: dict, n: int, layer: int, last: bool, budget: int) -> None:
    assert take.chunk_budget(EvictionConfig("take", **settings), n, layer, 4, last) == budget


def choice(q: torch.Tensor, keys: torch.Tensor, count: int, kernel: int, gqa: str, scale: float, cap: float):
    """Best ``count`` entries of each KV head by plain loops."""
    group = len(q) // len(keys)
    found = []
    for head, stored in enumerate(keys.double().numpy()):
        rows = [
            np.mean([attention_row(row, stored, scale, cap) for row in q[hq].double().numpy()], axis=0)
            for hq in range(head * group, (head + 1) * group)
        ]
        joined = np.max(rows, axis=0) if gqa == "max" else np.mean(rows, axis=0)
        found.append(reference.best(pooled(joined.tolist(), "avg", kernel), count))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_chunk_keeps_what_the_probe_attends_to(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    kernel, gqa, cap = [1, 3, 5][seed % 3], ["mean", "max"][seed % 2], [None, 4.0][seed // 2 % 2]
    cfg = EvictionConfig("take", budget=24, take_probe=6, take_warmup_budget=40, kernel=kernel, gqa=gqa)
    q, keys = torch.randn(8, 6, 16, generator=g) * 2, torch.randn(4, 90, 16, generator=g)
    settings = {"scale": 0.3, "logit_softcap": cap}
    for layer, last, count in ((0, False, 40), (2, False, 24), (3, True, 24)):
        kept = take.select(cfg, q, keys, layer, 4, last, **settings)
        seen = keys[:, :84] if last else keys
        expected = choice(q, seen, count - 6 * last, kernel, gqa, 0.3, cap)
        ends = list(range(84, 90)) if last else []
        assert [head.tolist() for head in kept] == [head + ends for head in expected]
    assert [head.tolist() for head in take.select(cfg, q, keys[:, :24], 3, 4, True)] == [list(range(24))] * 4


@pytest.mark.parametrize(("n", "ratio", "probe", "window"), [(70, 0.3, 6, 6), (100, 0.1, 32, 5)])
def test_one_chunk_without_warmup_is_one_decision(n: int, ratio: float, probe: int, window: int) -> None:
    """Also where a small ratio shrinks the probe: ten entries of 100 have room for five rows."""
    cfg = EvictionConfig("take", keep_ratio=ratio, take_probe=probe, take_warmup_layers=0)
    layers = [LayerInputs(torch.randn(4, probe, 8), torch.randn(2, n, 8)) for _ in range(3)]
    for layer, (x, kept) in enumerate(zip(layers, decide(cfg, layers), strict=True)):
        again = take.select(cfg, x.q_window, x.keys, layer, 3, last=True)
        assert [a.tolist() for a in again] == [b.tolist() for b in kept]
        assert all(len(head) == round(ratio * n) for head in kept)
        assert all(head[-window:].tolist() == list(range(n - window, n)) for head in kept)
