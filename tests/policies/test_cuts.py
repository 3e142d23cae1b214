"""The search for the cut: whichever way keys lie on processes, it is the wanted-th largest of all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.policies import EvictionConfig, LayerScores, cuts, select, whole_model
from vllm_kvevict.policies.cuts import DIGITS, NOTHING, CutSearch, tally
from vllm_kvevict.policies.select import order_keys

KEYS = st.one_of(
    st.integers(-(2**63), 2**63 - 2),  # the largest of all is no key, it is the cut that leaves nothing
    st.integers(-100, 100),
    st.integers(2**47 - 50, 2**47 + 50),
    st.sampled_from([0, -1, -(2**63), 2**63 - 2, 0x3F12 << 48, 0x3F12 << 32]),
)


def find(parts: list[torch.Tensor], wanted: int) -> tuple[int, int]:
    """The cut, and in how many rounds it was found."""
    search, rounds = CutSearch(wanted), 0
    while search.cut is None:
        search.on_tallies([tally([part], search.question) for part in parts])
        rounds += 1
    return search.cut, rounds


@given(data=st.data(), most=st.sampled_from([0, 1, 5, 4096]))
def test_the_cut_is_that_of_all_keys_sorted(data, most) -> None:
    keys = data.draw(st.lists(KEYS, min_size=1, max_size=60, unique=True))
    wanted = data.draw(st.integers(0, len(keys)))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys)))
    parts = [torch.tensor([k for k, o in zip(keys, owners, strict=True) if o == p]).long() for p in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "MOST_KEYS", most)
        cut, rounds = find(parts, wanted)
    stay = {key for key in keys if key >= cut}
    assert stay == set(sorted(keys, reverse=True)[:wanted])
    assert rounds <= DIGITS


def test_long_prompts_take_few_rounds_and_small_messages() -> None:
    """A million scores that are spread as attention is."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(4, 250_000, generator=g).log().neg() ** 4
    parts = [order_keys(scores[i : i + 1], i, 4) for i in range(4)]
    search, sizes = CutSearch(200_000), []
    while search.cut is None:
        tallies = [tally([part], search.question) for part in parts]
        sizes.append(max(len(one.values) for one in tallies))
        search.on_tallies(tallies)
    everything = torch.cat([part.flatten() for part in parts])
    assert int((everything >= search.cut).sum()) == 200_000
    assert len(sizes) <= 3 and max(sizes) <= 8192


def test_equal_scores_are_told_apart_by_their_places() -> None:
    """All keys have the same upper half, so that every digit is asked for."""
    parts = [order_keys(torch.zeros(1, 5000), i, 4) for i in range(4)]
    cut, rounds = find(parts, 7777)
    assert int((torch.cat(parts) >= cut).sum()) == 7777 and rounds == DIGITS


def test_nothing_and_too_much() -> None:
    assert find([torch.arange(5)], 0) == (NOTHING, 0)
    with pytest.raises(ValueError, match="7 keys are wanted, there are 5"):
        find([torch.arange(5)], 7)


@pytest.mark.parametrize("most", [0, 4096])
def test_keys_that_change_between_rounds_are_noticed(most: int, monkeypatch) -> None:
    monkeypatch.setattr(cuts, "MOST_KEYS", most)
    search = CutSearch(7)
    search.on_tallies([tally([torch.arange(10)], search.question)])
    with pytest.raises(ValueError, match="9 keys were told of, there are 10"):
        search.on_tallies([tally([torch.arange(9)], search.question)])


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_stages_keep_what_one_process_keeps(stages: int) -> None:
    config = EvictionConfig("layer-defensivekv", keep_ratio=0.3, window=8)
    n, g = 200, torch.Generator().manual_seed(stages)
    # With equal scores, also across layers.
    scores = torch.rand(6, 3, n - 8, generator=g).mul(20).round()
    layers = [LayerScores(index, 6, 3, rows) for index, rows in enumerate(scores)]
    parts = [layers[first : first + 6 // stages] for first in range(0, 6, 6 // stages)]
    search = CutSearch(whole_model.wanted(config, n, 6, 3))
    while search.cut is None:
        told = [tally(whole_model.order_of(config, part, n, None), search.question) for part in parts]
        search.on_tallies(told)
    chosen = [kept for part in parts for kept in whole_model.select_above(config, part, n, search.cut, None)]
    for ours, theirs in zip(chosen, select(config, layers, n), strict=True):
        for mine, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(mine, wanted)
    assert sum(len(row) for rows in chosen for row in rows) == 6 * 3 * 60
