"""Files of tests run in the order of what they took, and what `make test` leaves out is there for `make test-more`."""

import re

import pytest

from tests import durations, more
from tests.documents import ROOT


def test_files_that_take_longest_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a.py::one": 2.0, "b.py::two": 1.5, "b.py::three[x]": 1.5, "c.py::left_out": 9.0}
    monkeypatch.setattr(durations, "stored", lambda: seconds)
    names = ["a.py::new", "a.py::one", "b.py::three[x]", "d.py::new", "b.py::two"]
    assert [names[place] for place in durations.longest_first(names)] == [
        *("b.py::three[x]", "b.py::two", "a.py::new", "a.py::one", "d.py::new"),
    ]


def test_what_is_stored_is_of_this_tree() -> None:
    files = {durations.file_of(name) for name in durations.stored()}
    assert len(files) > 50 and sum((ROOT / file).exists() for file in files) > 0.9 * len(files)


def test_the_two_runs_are_each_others_rest() -> None:
    makefile = (ROOT / "Makefile").read_text()
    runs = dict(re.findall(r"^(test|test-more):.*\n\t\$\(PYTEST\) -m (\"[^\"]*\"|\w+) ", makefile, re.M))
    assert runs == {"test": '"not more"', "test-more": "more"}


@pytest.mark.parametrize("file", more.MORE)
def test_what_is_left_to_the_second_run_is_there(file: str) -> None:
    functions = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.M)
    names = {name.removeprefix("tests/") for name in durations.stored()} | {
        f"{file}::{name}" for name in functions
    }
    assert any(name.startswith(f"{file}::") and more.is_more(f"tests/{name}", False) for name in names)


def test_policies_beyond_the_sample_are_left_to_the_second_run_on_engines_alone() -> None:
    for name, is_more in (("cake", True), ("two ranks-cake", True), ("lava", False), ("ada-snapkv", False)):
        assert more.is_more(f"tests/engine/served/test_turns.py::test_each[{name}]", True) is is_more
        assert not more.is_more(f"tests/policies/test_cuts.py::test_each[{name}]", False)
