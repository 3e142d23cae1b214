"""take: chunks, averaged queries, budgets, and every chunk's choice against plain loops in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
