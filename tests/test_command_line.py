"""The command line `vllm-kvevict`: what it offers, what it loads, and what it says where something is missing."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvevict import __main__ as command_line

ROOT = Path(__file__).resolve().parent.parent
LOADED = """
import json, sys
from vllm_kvevict.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(json.dumps([name for name in ("torch", "vllm", "matplotlib", "rich") if name in sys.modules]))
"""


def loaded(*words: str) -> list[str]:
    """Which large packages a command imports."""
    run = [sys.executable, "-c", LOADED, *words]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    return list(json.loads(ended.stdout.splitlines()[-1]))


def test_help_names_every_command_and_loads_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name, (_, about) in command_line.COMMANDS.items():
        assert f"  {name} " in shown and about in shown
    assert loaded("--help") == []
    assert "torch" in loaded("policies")


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_every_command_has_a_help_under_its_own_name(command, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: vllm-kvevict {command}")


def test_sizing_and_quality_need_no_vllm_for_their_help():
    assert "vllm" not in loaded("sizing", "--help")
    assert loaded("quality", "--help") == ["rich"]


@pytest.mark.parametrize("words", [["sizing", "--memory", "1GiB", "--model"], ["doctor"]])
def test_vllm_says_nothing_of_its_own(words, tmp_path):
    """In an environment with no variables for it."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 16384}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
        "PYTHONPATH": str(ROOT)
    }
    run = [sys.executable, "-m", "vllm_kvevict", *words, str(tmp_path)]
    ended = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith({"sizing": "KV of one token", "doctor": "python "}[words[0]])


@pytest.mark.parametrize("words", [[], ["nothing"], ["quality"], ["policies", "--nothing"]])
def test_wrong_words_are_an_error(words, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("vllm-kvevict")


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich" or "kvevict.quality" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command_line.main(["quality", "report", "folder"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-kvevict quality: error: rich") and "extra `quality`" in line


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_ctrl_c_ends_a_command_without_a_traceback(name, monkeypatch, capsys):
    def interrupted(words, program):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(command_line.COMMANDS[name][0]), "main", interrupted)
    assert command_line.main([name]) == 130
    assert capsys.readouterr().err == f"vllm-kvevict {name}: interrupted\n"


SIZING = ["sizing", "--model", "benchmarks/quality/needle", "--memory", "1GiB", "--prompt", "2048"]


QUICK = (["--help"], ["policies"], ["quality", "--help"])
"""Commands that import no vLLM. What is left to write at the end is the command line's own business, for all alike."""


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [*((words, "") for words in QUICK), *((words, "1") for words in (*QUICK, ["doctor"], SIZING))],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_a_reader_that_goes_ends_a_command_without_a_word(words, unbuffered):
    """Whether the command prints at once or at its end."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vllm_kvevict", *words]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, cwd=ROOT, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    # argparse itself does not mind, and vLLM may have something else to say.
    assert ended.returncode in (0, command_line.NOBODY_READS)
    assert "Broken" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
