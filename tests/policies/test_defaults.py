"""Two defaults of a parameter: the measured one and the paper's, as a policy states them that only this file knows."""

from collections.abc import Iterator

import pytest

from tests.registering import policy_with_both_defaults
from vllm_kvevict.policies import EvictionConfig, available, parameters
from vllm_kvevict.policies.params import DEFAULTS, choice, integer, measured


@pytest.fixture(autouse=True)
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield policy_with_both_defaults(monkeypatch)


def config(policy: str, **settings) -> EvictionConfig:
    return EvictionConfig(policy, budget=64, **settings)


def test_each_kind_gives_its_own(policy):
    ours, theirs = parameters(policy), parameters(policy, "paper")
    assert ours == parameters(policy, "measured")
    assert (ours["kernel"], ours["rows"], ours["window"]) == (31, "max", 32)
    assert (theirs["kernel"], theirs["rows"], theirs["window"]) == (7, "mean", 32)
    assert config(policy).params == ours == config(policy, defaults="measured").params
    assert config(policy, defaults="paper").params == theirs


def test_what_is_given_is_taken_whatever_the_defaults(policy):
    for defaults in DEFAULTS:
        assert config(policy, defaults=defaults, kernel=9).params["kernel"] == 9
    assert config(policy, defaults="paper", kernel=31, rows="max") == config(policy)
    assert config(policy, defaults="paper") == config(policy, kernel=7, rows="mean") != config(policy)


def test_a_configuration_survives_without_its_kind(policy):
    theirs = config(policy, defaults="paper")
    assert "defaults" not in theirs.to_dict()
    assert EvictionConfig(**theirs.to_dict()) == theirs
    assert EvictionConfig(policy, budget=64, defaults="paper") == theirs


def test_a_default_that_is_not_used_is_left_out(monkeypatch):
    """With a measured pooling that does without a kernel, only the paper's has one."""
    monkeypatch.undo()
    policy = policy_with_both_defaults(monkeypatch, pooling="decay")
    ours, theirs = config(policy), config(policy, defaults="paper")
    assert "kernel" not in ours.params and (theirs.params["pooling"], theirs.params["kernel"]) == ("max", 7)
    assert config(policy, pooling="max") == theirs
    assert EvictionConfig(**ours.to_dict()) == ours
    assert config(policy, pooling="avg", kernel=5).params["kernel"] == 5
    assert config(policy, kernel=5) == config(policy, pooling="max", kernel=5)
    with pytest.raises(ValueError, match="kernel is not used with pooling=decay"):
        config(policy, pooling="decay", kernel=5)


def test_measured_defaults_are_values_that_the_parameter_takes():
    with pytest.raises(ValueError, match="window"):
        measured(integer("window", 32, 1), 0)
    same = measured(choice("gqa", "mean", "max"), "mean")
    assert same.setting == "gqa=mean"


@pytest.mark.parametrize("name", [name for name in available() if name != "full"])
def test_every_policy_has_both(name):
    for defaults in DEFAULTS:
        found = EvictionConfig(name, keep_ratio=0.5, defaults=defaults).params
        assert found.items() <= parameters(name, defaults).items()
