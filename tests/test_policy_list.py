"""Policies as command lines list them."""

import pytest

from vllm_kvevict.policies import available, parameters
from vllm_kvevict.policy_list import PolicySpec, checked, parse


@pytest.mark.parametrize(
    ("text", "entry", "values"),
    [
        ("snapkv", PolicySpec("snapkv"), {}),
        ("snapkv@wide", PolicySpec("snapkv", (), "wide"), {}),
        ("snapkv@a:b=1@c", PolicySpec("snapkv", (), "a:b=1@c"), {}),
        ("lava:kernel=31", PolicySpec("lava", (("kernel", "31"),)), {"kernel": 31}),
        (
            "ada-snapkv:rows=max,alpha=0.20@x y",
            PolicySpec("ada-snapkv", (("rows", "max"), ("alpha", "0.20")), "x y"),
            {"rows": "max", "alpha": 0.2},
        ),
        ("take:take_chunk=256,n=null,t=true", None, {"take_chunk": 256, "n": "null", "t": True}),
    ],
)
def test_entries(text, entry, values):
    found = parse(text)
    assert (entry is None or found == entry) and found.parameters == values and str(found) == text
    assert found.field in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not POLICY[:NAME=VALUE,...][@NOTE]"),
        ("snap kv", "is not POLICY"),
        ("snapkv:kernel", "'kernel' is not NAME=VALUE"),
        ("snapkv:kernel=3, alpha=1", "is not POLICY"),
        ("snapkv:kernel=3,alpha=1,kernel=3", "names kernel twice"),
    ],
)
def test_wrong_entries(text, message):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_every_default_can_be_written():
    for policy in available():
        for name, value in parameters(policy).items():
            assert parse(f"{policy}:{name}={value}").parameters == {name: value}


def test_unknown_policies_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown policy 'x' \(choose from snapkv, lava\)"):
        checked(["snapkv", "x:kernel=3"], ["snapkv", "lava"])
    assert checked(["lava", "lava", "lava:kernel=3"], ["lava"]) == [parse("lava"), parse("lava:kernel=3")]
