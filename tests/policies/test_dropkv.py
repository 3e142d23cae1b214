"""How far outputs move without a token, where the plain formula has no digits left."""

import pytest
import torch

from vllm_kvevict.policies.dropkv import moved_outputs

TOKENS, CANDIDATES, SIZE = 40, 32, 16


def by_dropping(attention: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In float64, token by token, from logits: what is left is normalised without the token."""
    outputs = attention.softmax(1) @ values
    moved = []
    for token in range(CANDIDATES):
        rest = attention.clone()
        rest[:, token] = -torch.inf
        moved.append((rest.softmax(1) @ values - outputs).square().sum())
    return torch.stack(moved)


def logits(peak: float, rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which each has one token above all others, by so much; the last row's is no candidate."""
    g = torch.Generator().manual_seed(seed)
    attention, values = torch.randn(rows, TOKENS, generator=g), torch.randn(TOKENS, SIZE, generator=g)
    for row in range(rows):
        attention[row, TOKENS - 2 if row == rows - 1 else 7 * row] += peak
    return attention, values


@pytest.mark.parametrize("peak", [0.0, 3.0, 10.0, 15.0, 20.0, 40.0])
def test_it_is_what_dropping_a_token_changes(peak):
    attention, values = logits(peak)
    wanted = by_dropping(attention.double(), values.double())
    found = moved_outputs(attention.softmax(1), values, CANDIDATES)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-9)


def test_a_row_in_which_one_token_has_all_the_attention():
    attention, values = logits(1e4)
    found = moved_outputs(attention.softmax(1), values, CANDIDATES)
    wanted = values[[0, 7]].square().sum(1)
    torch.testing.assert_close(found[[0, 7]], wanted)
    assert float(found.sum() - found[[0, 7]].sum()) == 0


def test_equal_values_move_nothing():
    attention, values = logits(2.0)
    found = moved_outputs(attention.softmax(1), values[:1].expand(TOKENS, SIZE).contiguous(), CANDIDATES)
    assert float(found.abs().max()) < 1e-5
