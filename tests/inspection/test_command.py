"""What the command ``inspect`` refuses before it starts an engine, and that it reads prompts as they are."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.documents import ROOT
from vllm_kvevict.chats import read_text
from vllm_kvevict.inspect import __main__ as command


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Where a user is, with a prompt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "Hello."}]')


@pytest.fixture
def refusal(monkeypatch, capsys):
    """The sentence that the command ends with, which must come before an engine is asked for."""
    monkeypatch.setattr(command, "quieten", lambda: pytest.fail("an engine would be started"))

    def of(*words):
        with pytest.raises(SystemExit) as ended:
            command.main(["MODEL", *words], "inspect")
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1].removeprefix("inspect: error: ")

    return of


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--prompt empty.txt", "--prompt empty.txt is empty"),
        ("--prompt picture.png", "--prompt picture.png is not text in UTF-8"),
        ("--prompt prompt.txt --json no/x.json", "--json no/x.json: there is no such folder"),
        ("--prompt prompt.txt --json inspect.html", "--json inspect.html is the file of --output: "),
        ("--prompt prompt.txt --compare snapkv lavas", "--compare: unknown policy 'lavas' (choose from "),
        ("--prompt prompt.txt --compare lava:kernel", "--compare: 'lava:kernel' is not POLICY[:NAME=VALUE,...]"),
        ("--chat chat.json --turns 5", "--chat cannot be used with --turns: "),
        ("--chat chat.json --output chat.json", "--output chat.json is the file of --chat: "),
    ],
)  # fmt: skip
def test_wrong_arguments(words, sentence, refusal):
    assert refusal(*words.split()).startswith(sentence)


@pytest.mark.parametrize("flag", ["--chat", "--branch"])
def test_chats(flag, refusal, tmp_path):
    """What else is wrong with them is the reader's to say."""
    (tmp_path / "bad.json").write_text('[{"role": "user", "content": 5}]')
    before = ["--chat", "chat.json"] if flag == "--branch" else []
    sentence = "bad.json, message 1: content must be text or a list of parts, not 5"
    assert refusal(*before, flag, "bad.json") == f"{flag} {sentence}"


HOSTILE = "</script>\r\n<b>\0 & \\ 😀 \u202e שלום \ufeff\r"


def test_line_ends_are_part_of_the_prompt(tmp_path, monkeypatch):
    path = tmp_path / "hostile.txt"
    path.write_bytes(HOSTILE.encode())
    assert read_text(str(path), "--prompt") == HOSTILE
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(HOSTILE.encode())))
    assert read_text("-", "--prompt") == HOSTILE
    assert path.read_text() != HOSTILE  # the control: as Python reads texts otherwise


def test_without_vllm():
    code = "import sys; sys.modules['vllm'] = None; from vllm_kvevict.inspect.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "MODEL", "--prompt", "prompt.txt"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "vllm is not installed" in ended.stderr.splitlines()[-1]
