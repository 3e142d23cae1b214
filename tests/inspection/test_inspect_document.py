"""The picture of docs/INSPECT.md, made as a reader would."""

import runpy
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.engine.support.serving import ENVIRONMENT, forked_command
from tests.inspection.pages import read

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _no_memory_is_chosen(monkeypatch):
    """As where a reader starts it."""
    monkeypatch.delitem(ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE")


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
