"""The record of behaviour: a sample of it holds, and each part sees a change."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from tests.record import engines, scheduler
from tests.record.__main__ import recorded
from tests.record.lines import differences, digests
from vllm_kvevict.engine.scheduler import admission
from vllm_kvevict.engine.scheduler.shared.compressed import CompressedPrefixes
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.policies import attention

SEEDS = 2


def found(part: str) -> dict[str, tuple[int, str]]:
    return recorded(part)["runs"]


def test_every_run_of_the_scheduler_is_recorded() -> None:
    names = {f"{mix} {seed}" for mix in scheduler.MIXES for seed in range(scheduler.SEEDS)}
    assert found("scheduler").keys() == names


def test_every_scenario_of_engines_is_recorded() -> None:
    assert found("engines").keys() == engines.SCENARIOS.keys()


@pytest.mark.parametrize("mix", scheduler.MIXES)
def test_the_scheduler_does_what_it_did(mix: str) -> None:
    runs = {f"{mix} {seed}": scheduler.run(mix, seed) for seed in range(SEEDS)}
    expected = {name: found("scheduler")[name] for name in runs}
    assert differences(expected, digests(runs)) == []


def is_as_before(mix: str, seed: int) -> bool:
    """Whether a run is as the record says."""
    runs = {f"{mix} {seed}": scheduler.run(mix, seed)}
    return not differences({name: found("scheduler")[name] for name in runs}, digests(runs))


def test_a_change_of_the_scheduler_is_seen() -> None:
    """Each changes one thing that the record is of: admission, which prefix is dropped first, what requests leave."""
    with mock.patch.object(admission, "PATIENCE", 1):
        assert not all(is_as_before("tight", seed) for seed in range(8))
    with mock.patch.object(CompressedPrefixes, "touch", lambda cache, prefix: None):
        assert not all(is_as_before("conversations", seed) for seed in range(4))
    with mock.patch.object(Tails, "detach", lambda tails, request, account, untold: None):
        assert not all(is_as_before("conversations", seed) for seed in range(4))


@pytest.mark.engine
def test_a_change_of_what_engines_keep_is_seen(tmp_path: Path) -> None:
    """On any processor: two runs are alike, and one that pools no scores is not."""
    scenario = dataclasses.replace(engines.SCENARIOS["chunked"], asks=engines.every_policy(4)[:6])
    first, again = engines.run(scenario, tmp_path), engines.run(scenario, tmp_path)
    assert first == again
    with mock.patch.object(attention, "pool", lambda scores, *_, **__: scores):
        assert engines.run(scenario, tmp_path) != first


def test_what_is_not_as_it_was_is_named() -> None:
    before, now = {"a": (3, "x"), "b": (2, "y")}, {"a": (3, "x"), "c": (1, "z")}
    assert differences(before, now) == ["b was not run", "c is not in the record"]
    assert differences({"a": (3, "x")}, {"a": (4, "z")}) == ["a differs: 3 lines before, 4 now"]
