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
        (["--prompt", "empty.txt"], "--prompt empty.txt is empty"),
        (["--prompt", "folder"], "--prompt folder cannot be read: Is a directory"),
        (["--prompt", "picture.png"], "--prompt picture.png is not text in UTF-8"),
        (["--prompt", "prompt.txt", "--output", "folder"], "--output folder is a folder: name a file"),
        (["--prompt", "prompt.txt", "--json", "no/x.json"], "--json no/x.json: there is no such folder"),
        (
            ["--prompt", "prompt.txt", "--output", "folder/../prompt.txt"],
            "--output folder/../prompt.txt is the file of --prompt: name another one",
        ),
        (
            ["--prompt", "prompt.txt", "--json", "inspect.html"],
            "--json inspect.html is the file of --output: name another one",
        ),
    ],
)
def test_files(words, sentence, refusal):
    assert refusal(*words) == sentence


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("lavas", "--compare: unknown policy 'lavas' (choose from "),
        (
            "lava:kernel",
            "--compare: 'lava:kernel' is not POLICY[:NAME=VALUE,...][@NOTE]: 'kernel' is not NAME=VALUE",
        ),
        ("lava:krnel=3", "--compare: krnel is not a parameter of policy lava (valid parameters: window, "),
        ("lava:kernel=4", "--compare: kernel must be an odd integer >= 1, not 4"),
        ("full:kernel=3", "--compare: "),
        (
            "lava:kernel=3,kernel=5",
            "--compare: 'lava:kernel=3,kernel=5' is not POLICY[:NAME=VALUE,...][@NOTE]: it names kernel twice",
        ),
    ],
)
def test_policies_to_compare(entry, sentence, refusal):
    assert refusal("--prompt", "prompt.txt", "--compare", "snapkv", entry).startswith(sentence)


def test_a_file_that_may_not_be_written(refusal, tmp_path, monkeypatch):
    """Who runs tests as root may write everywhere, so another answer of the system's is put in its place."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "page.html")
    (tmp_path / "page.html").touch()
    sentence = refusal("--prompt", "prompt.txt", "--output", "page.html")
    assert sentence == "--output page.html cannot be written: choose another place"


def test_a_full_disk(monkeypatch, capsys):
    monkeypatch.setattr(command, "_read", lambda *args: None)
    monkeypatch.setattr(command, "render", lambda inspection: "x" * 100_000)
    with pytest.raises(SystemExit) as ended:
        command.main(["MODEL", "--prompt", "prompt.txt", "--output", "/dev/full"], "inspect")
    assert ended.value.code == 2
    sentence = "error: --output /dev/full cannot be written: No space left on device"
    assert capsys.readouterr().err.splitlines()[-1].endswith(sentence)


@pytest.mark.parametrize("flag", ["--chat", "--branch"])
def test_chats(flag, refusal, tmp_path):
    """What else is wrong with them is the reader's to say."""
    (tmp_path / "bad.json").write_text('[{"role": "user", "content": 5}]')
    before = ["--chat", "chat.json"] if flag == "--branch" else []
    sentence = "bad.json, message 1: content must be text or a list of parts, not 5"
    assert refusal(*before, flag, "bad.json") == f"{flag} {sentence}"
    (tmp_path / "bad.json").write_text('[{"role": "user", "content": "Hello."}]\n' * 2)
    sentence = "bad.json has 2 chats: give a file with one of them"
    assert refusal(*before, flag, "bad.json") == f"{flag} {sentence}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--turns", "5"], "--chat cannot be used with --turns: each says where a prompt is evicted"),
        (
            ["--prefix-len", "5"],
            "--chat cannot be used with --prefix-len: each says where a prompt is evicted",
        ),
        (["--prompt", "prompt.txt"], "argument --prompt: not allowed with argument --chat"),
        (["--output", "chat.json"], "--output chat.json is the file of --chat: name another one"),
    ],
)
def test_what_does_not_go_with_a_chat(words, sentence, refusal):
    assert refusal("--chat", "chat.json", *words) == sentence


def test_what_does_not_go_with_a_prompt(refusal):
    assert refusal() == "one of the arguments --prompt --chat is required"
    sentence = "--turns cannot be used with --prefix-len: each says where a prompt is evicted"
    assert refusal("--prompt", "prompt.txt", "--turns", "5", "9", "--prefix-len", "7") == sentence
    sentence = "--branch is for --chat: it is another chat that begins like it"
    assert refusal("--prompt", "prompt.txt", "--branch", "chat.json") == sentence


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
