"""The command and the picture of docs/INSPECT.md, made as a reader would."""

import json
import random
import runpy
import subprocess
import sys

import pytest

from tests.documents import ROOT, blocks, commands
from tests.engine.support.serving import ENVIRONMENT, forked_command
from tests.inspection.pages import read
from vllm_kvevict.quality.tasks import make

DOCUMENT = ROOT / "docs/INSPECT.md"
ENGINE = ("--dtype", "float32")
"""A test's machine may have no instructions for the model's own bfloat16."""

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _no_memory_is_chosen(monkeypatch):
    """As where a reader starts it."""
    monkeypatch.delitem(ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE")


def test_the_command(tmp_path):
    line, _ = commands(DOCUMENT)
    (tmp_path / "prompt.txt").write_text("what is kept of a text like this one ? " * 40)
    places = {
        "MODEL": ROOT / "benchmarks/quality/needle",
        "prompt.txt": tmp_path / "prompt.txt",
    }
    page = tmp_path / "inspect.html"
    done = forked_command(*(places.get(word, word) for word in line), "--output", page, *ENGINE)
    assert done.returncode == 0, done.stderr
    assert [policy["policy"] for policy in read(page.read_text())["policies"]] == [
        "ada-snapkv",
        "lava",
        "snapkv",
    ]


def said(role, number, words):
    """A message in the small model's words."""
    sample = make("single", words, random.Random(number))
    return {"role": role, "content": f"{sample.context} {sample.question}"}


def test_the_command_for_conversations(tmp_path):
    """The table of the document is what it prints."""
    _, line = commands(DOCUMENT)
    begin = [said("system", 1, 400), said("user", 2, 150), said("assistant", 3, 150), said("user", 4, 200)]
    for name, answer in (("chat", said("assistant", 6, 80)), ("branch", said("assistant", 7, 120))):
        chat = [*begin, answer, {"role": "user", "content": "what is kept ?"}]
        (tmp_path / f"{name}.json").write_text(json.dumps(chat))
    places = {name: tmp_path / name for name in ("chat.json", "branch.json")}
    places["MODEL"] = ROOT / "benchmarks/quality/needle"
    page = tmp_path / "inspect.html"
    done = forked_command(*(places.get(word, word) for word in line), "--output", page, *ENGINE)
    assert done.returncode == 0, done.stderr
    assert read(page.read_text())["shared_turns"] == 2
    assert "".join(blocks(DOCUMENT, "text")) in done.stderr


@pytest.fixture
def inspect_is_forked(monkeypatch):
    """The Python that a script starts for ``inspect``."""
    run = subprocess.run

    def run_forked(words, **options):
        if words[:3] != [sys.executable, "-m", "vllm_kvevict.inspect"]:
            return run(words, **options)
        done = forked_command("vllm-kvevict", "inspect", *words[3:])
        assert done.returncode == 0, done.stderr
        return done

    monkeypatch.setattr(subprocess, "run", run_forked)


def test_the_picture(browser, inspect_is_forked, tmp_path, monkeypatch):
    """What is said of it is true, and it is small enough to be shown beside text."""
    monkeypatch.setattr(sys, "argv", ["screenshot.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "docs/images/screenshot.py"), run_name="__main__")
    assert 50_000 < (tmp_path / "inspect.png").stat().st_size < 400_000
    assert 50_000 < (ROOT / "docs/images/inspect.png").stat().st_size < 400_000
    page = read((tmp_path / "inspect.html").read_text())
    words = [text.strip() for text in page["token_texts"]]
    answer = next(i for i in range(len(words)) if words[i : i + 3] == ["ties", "drive", "model"])
    ours, ends = (shares(page, policy) for policy in page["policies"])
    text = ours[20:-60]
    assert sum(ours[answer : answer + 3]) / 3 > 5 * sum(text) / len(text)
    assert {*ends[:4], *ends[-60:]} == {1} and not any(ends[20:-100])


def shares(page, policy):
    """Share of the heads that keep each token."""
    heads = [{*head} for layer in policy["kept"] for head in layer]
    return [sum(token in head for head in heads) / len(heads) for token in range(page["prompt_tokens"])]
