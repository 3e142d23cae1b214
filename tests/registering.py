"""Policies that exist while a test runs."""

from dataclasses import replace

import pytest

from vllm_kvevict.policies import ada_snapkv, registry, snapkv
from vllm_kvevict.policies.inputs import Q_WINDOW
from vllm_kvevict.policies.params import measured
from vllm_kvevict.policies.registry import Policy, register

MEASURED: dict[str, str | int] = {"kernel": 31, "rows": "max"}


def policy_with_both_defaults(monkeypatch: pytest.MonkeyPatch, **ours: str | int) -> str:
    """Register ada-snapkv under another name, with measured defaults (MEASURED unless given); its name."""
    ours = ours or MEASURED
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    plain = [replace(one, default=one.default_of("paper"), paper=None) for one in ada_snapkv.PARAMETERS]
    parameters = tuple(measured(one, ours[one.name]) if one.name in ours else one for one in plain)
    policy = Policy(
        "ada-measured",
        "as ada-snapkv, with other defaults",
        "a test",
        snapkv.score,
        ada_snapkv.POLICY.select,
        parameters,
        needs=(Q_WINDOW,),
        window_rows="mean",
        heads_compete=True,
        always_kept=("window",),
    )
    register(policy)
    return policy.name
