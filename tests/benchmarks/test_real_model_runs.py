"""The comparison on a real model, against a server that only pretends."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from benchmarks import real_model
from benchmarks.harness.server import ServerError
from benchmarks.real_model import parse_arguments
from tests.quality.fake_openai import MODEL, FakeServer
from vllm_kvevict.quality.__main__ import main as quality
from vllm_kvevict.quality.fidelity import FIDELITY


def arguments(tmp_path, *more: str):
    words = ["--model", f"/models/{MODEL}", "--output", str(tmp_path / "real"), "--policies", "snapkv"]
    words += ["--budgets", "0.2", "--scopes", "prompt", "--tokens", "300", "--tasks", "number"]
    found = parse_arguments([*words, "--samples", "2", "--fidelity-samples", "1", *more])
    # The pretended server does not know the control.
    found.policies = [policy for policy in found.policies if policy != real_model.CONTROL]
    return found


@pytest.fixture
def run(monkeypatch):
    """Measures with a pretended server; how many requests it had."""

    async def in_this_process(words):
        if code := await asyncio.to_thread(quality, words):
            raise ServerError(f"exit code {code}")

    def measure(given) -> int:
        asked = []

        @asynccontextmanager
        async def start(_):
            with FakeServer() as server:
                yield server.url
                asked.append(len(server.asked))

        asyncio.run(real_model.run(given, start))
        return asked[0]

    monkeypatch.setattr(real_model, "quality", in_this_process)
    return measure


def test_measures_once_and_continues_after_an_error(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    measure = real_model.quality

    async def fails_at_questions(words):
        if words[0] == "run":
            raise ServerError("ended")
        await measure(words)

    monkeypatch.setattr(real_model, "quality", fails_at_questions)
    with pytest.raises(ServerError):
        run(arguments(tmp_path))
    folder = tmp_path / "real" / "300-prompt"
    assert (folder / FIDELITY).exists()
    monkeypatch.setattr(real_model, "quality", measure)
    assert run(arguments(tmp_path)) == 4  # the questions alone
    given = arguments(tmp_path, "--tokens", "300", "600")
    # Nothing but whether the server evicts is asked again.
    assert run(given) > run(given)
    settings = (folder / "settings.json").read_text()
    assert json.loads(settings)["model"] == MODEL and "--output real/300-prompt" in settings
    assert (folder / "report.md").exists() and str(tmp_path) not in settings
    table = (tmp_path / "real" / "table.md").read_text()
    titles = [line for line in table.splitlines() if line.startswith("## ")]
    assert titles == ["## 300 tokens, scope prompt", "## 600 tokens, scope prompt"]
    assert table.count("| snapkv | 0.2 |") == 2 and "\n\n\n" not in table


def test_the_control_is_always_measured_and_take_is_not():
    policies = parse_arguments([]).policies
    assert policies[:2] == ["full", "streaming-llm"] and "take" not in policies
