"""The comparison of two runs of vLLM's tests: what it must find, and that the witness tells how each ended."""

import pytest

from tests.vllms import __main__ as command
from tests.vllms import outcomes
from tests.vllms.outcomes import Run

TESTS = {"a": "passed", "b": "failed", "c": "passed"}


def with_package(**settings) -> Run:
    return Run(**{"tests": TESTS, "loaded": [7, 9], "hooked": [True, True], "ended": 1} | settings)


def without(**settings) -> Run:
    return Run(**{"tests": TESTS, "loaded": [0, 0], "hooked": [False, False], "ended": 1} | settings)


@pytest.mark.parametrize(
    ("ours", "stock", "sentence"),
    [
        ({"loaded": [0, 0]}, {}, "the package was not loaded in the run with it"),
        ({}, {"loaded": [0, 1]}, "the package was loaded in the run without it"),
        ({}, {"hooked": [False, True]}, "the package was loaded in the run without it"),
        ({"ended": None}, {}, "the run with the package did not end"),
        (
            {},
            {"tests": {"a": "passed"}},
            "only 1 tests passed without the package, of at least 2: too few to compare",
        ),
        ({}, {"ended": 4}, "the run without the package ended with pytest's exit code 4"),
    ],
)
def test_runs_that_say_nothing(ours, stock, sentence):
    lines, alike = outcomes.report(with_package(**ours), without(**stock), least=2)
    assert not alike and f"error: {sentence}" in lines


EXAMPLE = """
import os

def test_passes(): pass
def test_fails(): assert False
def test_differs(): assert "VLLM_PLUGINS" in os.environ
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder that stands in for vLLM's sources, which the command then uses."""
    folder = tmp_path / "sources"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/__init__.py").touch()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "tests/test_example.py").write_text(EXAMPLE)
    monkeypatch.setattr(command, "sources", lambda: folder)
    monkeypatch.setattr(command, "make_stand_ins", lambda folder: folder / "none")
    return folder


def test_two_real_runs_of_a_few_tests(example, capfd):
    """The package is loaded in one of them, and a test that sees that is found."""
    assert command.main(["tests/test_example.py", "--least", "1"]) == 1
    said = capfd.readouterr().out.splitlines()
    name = "tests/test_example.py::test_differs: failed with the package, passed without"
    assert said[-2:] == [name, "1 ended differently"]
    (example / "tests/test_example.py").write_text(EXAMPLE.replace("VLLM_PLUGINS", "HF_HOME"))
    assert command.main(["tests/test_example.py", "--least", "1"]) == 0
    assert capfd.readouterr().out.endswith("\nall ended alike\n")


def test_another_version_of_vllm_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(command, "VERSION", "0.31.0")
    assert command.main([]) == 3
    assert capsys.readouterr().err.startswith("the tests are those of vLLM 0.31.0, and 0.3")
