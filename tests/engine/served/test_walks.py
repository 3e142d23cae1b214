"""The walks of ARCHITECTURE: each names every file of the folders that it is about, those that it opens once and in
order; and what a real engine opens is what is told."""

import re
from collections import Counter

import pytest

from tests.documents import ROOT
from tests.engine.support.running import Ask, engine, run
from tests.engine.support.walks import Passed, files

TEXT = (ROOT / "docs/ARCHITECTURE.md").read_text()
OPTIONS = {
    "policy": "take",
    "budget": 48,
    "take_chunk": 64,
    "take_probe": 16,
    "min_prompt": 0,
    "policies": "all",
}
DOCUMENT = Ask(301, "kvzip", 0.2, prefix_len=280, max_tokens=8)
REQUESTS = {
    "ada-snapkv": [Ask(300, "ada-snapkv", 0.2, max_tokens=8)],
    "kvzip": [DOCUMENT, DOCUMENT],
    "take": [Ask(333, "take", max_tokens=8)],
}
"""Of each walk, one after the other."""


def walks(text: str) -> dict[str, str]:
    """The text of each walk, by the policy that its heading names."""
    section = text.partition("\n## The walk of a request\n")[2].partition("\n## ")[0]
    _, *parts = section.split("\n### ")
    return {re.findall("`(.+?)`", part)[0]: part for part in parts}


def told(walk: str) -> tuple[list[str], list[str]]:
    """Files on a walk's way, which stand in lines of their own, and those that it does not open."""
    way, _, rest = walk.partition("\nNot opened, ")
    lines = re.findall(r"^ {8}(\S+\.py.*)$", way, re.M)
    return " ".join(lines).split(), re.findall(r"`((?:engine|schedules|cache)/\S+\.py)`", rest)


def wrong(walk: str, there: set[str]) -> list[str]:
    """What a walk leaves out, names twice, or names though it is not there."""
    named = Counter(name for part in told(walk) for name in part)
    return sorted({name for name in there | {*named} if named[name] != 1 or name not in there})


@pytest.mark.parametrize("policy", REQUESTS)
def test_a_walk_names_each_file_once(policy: str) -> None:
    walk, there = walks(TEXT)[policy], files()
    assert len(there) > 70 and not wrong(walk, there)
    assert wrong(walk, there | {"cache/made_up.py"}) == ["cache/made_up.py"]
    assert wrong(walk.replace("schedules/plan.py", "", 1), there) == ["schedules/plan.py"]
    assert wrong(walk + " `cache/pool.py`", there) == ["cache/pool.py"]


@pytest.mark.engine
def test_a_walk_opens_what_is_told(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened when a function of it runs."""
    monkeypatch.delenv("VLLM_KVEVICT_CHECK")  # which tests are run with
    settings = {"additional_config": {"kv_eviction": OPTIONS}, "max_num_batched_tokens": 100}
    with engine(models("llama"), **settings) as llm:
        for policy, asks in REQUESTS.items():
            with Passed() as passed:
                for ask in asks:
                    run(llm, [ask], recorded=False)
            way, rest = told(walks(TEXT)[policy])
            assert sorted(passed.files) == sorted(way), f"{policy}: {sorted({*passed.files} ^ {*way})}"
            assert not {*passed.files} & {*rest}
