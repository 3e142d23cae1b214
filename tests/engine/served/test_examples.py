"""The code of README and docs, and the examples that ask a server, with small servers that are forked."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import httpx
import pytest

import benchmarks.harness.server
from benchmarks import demo
from tests.documents import ROOT, blocks, commands
from tests.engine.support.clients import eventually, words
from tests.engine.support.forks import Forked, fork
from tests.engine.support.serving import ENVIRONMENT, ForkedServer, command

README = ROOT / "README.md"
CONFIGURATION = ROOT / "docs/CONFIGURATION.md"
MEASURING = ROOT / "docs/MEASURING-QUALITY.md"
NEEDLE = ROOT / "benchmarks/quality/needle"
SMALL = ("--enforce-eager", "--dtype", "float32")
"""What fits a test's machine, which may have no instructions for the model's own bfloat16."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server of the page on measuring quality."""
    (serve,) = (line for line in commands(MEASURING) if "benchmarks/quality/needle" in line)
    folder = tmp_path_factory.mktemp("examples")
    flags = ("--served-model-name", "MODEL", "--enable-prompt-tokens-details", "--override-generation-config")
    flags += ('{"max_new_tokens": 128}',)  # the documents' requests say no length
    with ForkedServer(NEEDLE, folder / "server.log", *serve[3:], *SMALL, *flags) as running:
        yield running


def serve_flags(name: str) -> list[str]:
    """Flags of the command with which an example's docstring starts the server."""
    lines = (ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text())) or "").splitlines()
    (line,) = re.findall(
        r"vllm serve MODEL (.*) &", " ".join(line.strip() for line in lines).replace("\\ ", "")
    )
    return line.split()


@pytest.mark.engine
def test_requests_over_http(server):
    requests = [block for block in blocks(CONFIGURATION, "python") if "chat.completions" in block]
    assert len(requests) == 3
    code = "\n".join(requests).replace("http://localhost:8000", server.url)
    before = server.metrics()
    exec(code, {"long_document": words(400), "question": words(5)})
    name = 'evictions_total{policy="snapkv"}'
    assert eventually(lambda: server.metrics()[name] > before.get(name, 0.0))


SERVES = [line for line in commands(CONFIGURATION) if line[:3] == ["vllm", "serve", "MODEL"]]


@pytest.mark.engine
@pytest.mark.parametrize("line", SERVES, ids=" ".join)
def test_serves(line, tmp_path):
    """As printed, but for the model, whose context is shorter than the longest in the documents."""
    flags = ["4096" if word == "131072" else word for word in line[3:]]
    with ForkedServer(NEEDLE, tmp_path / "log", *flags, *SMALL) as running:
        body: dict[str, Any] = {"model": running.model, "prompt": words(3000), "max_tokens": 40}
        body["ignore_eos"] = True  # an answer that ends within a lookahead evicts nothing
        if "full" in line:
            body["vllm_xargs"] = {"kv_eviction": "snapkv"}
        if "turns" in line:
            body["vllm_xargs"] = {"kv_turns": [1000]}  # of a prompt that is no chat the server finds none
        httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).raise_for_status()
        assert eventually(lambda: running.metrics()["evicted_tokens_total"] > 0)


@pytest.mark.engine
def test_demo(monkeypatch, capsys):
    """What ``make demo`` runs, smaller, with servers that are forked."""

    def fork_server(words: list[str], env: dict[str, str], stdout: IO[str], **_: object) -> Forked:
        return fork(["vllm", *words[1:]], env, Path(stdout.name))

    forking = SimpleNamespace(**{**vars(subprocess), "Popen": fork_server})
    monkeypatch.setattr(benchmarks.harness.server, "subprocess", forking)
    sizes = ["--requests", "3", "--prompt", "512", "--output", "16"]
    monkeypatch.setattr(sys, "argv", ["demo", *sizes])
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        code = demo.main()
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert "ada-snapkv" in out and "pages" in out and "the text says" in out


@pytest.mark.engine
def test_policies_per_request(server):
    done = command(sys.executable, "examples/per_request.py", "--url", f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^.*: '.*'$", done.stdout, re.M)) == 4
    assert "a bad value is refused" in done.stdout and "kv_budget" in done.stdout


@pytest.mark.engine
def test_one_document_with_many_questions(tmp_path):
    flags = serve_flags("rag_shared_document")
    assert "kvzip" in flags
    with ForkedServer(NEEDLE, tmp_path / "log", *flags, *SMALL) as running:
        done = command(sys.executable, "examples/rag_shared_document.py", "--url", f"{running.url}/v1")
    assert done.returncode == 0, done.stderr
    cached, tokens = zip(*re.findall(r"(\d+) of (\d+) tokens cached", done.stdout), strict=True)
    assert len(cached) > 5 and cached[0] == "0"
    # The first question reads the document; the others read their few words only.
    assert all(int(hit) > 0.9 * int(all_) for hit, all_ in zip(cached[1:], tokens[1:], strict=True))
    answers = re.findall(r"'\w+ \w+ (\w+)' \(expected (\w+)\)", done.stdout)
    assert sum(said == expected for said, expected in answers) > 0.7 * len(cached), done.stdout


@pytest.mark.engine
def test_a_chat_of_many_turns(server):
    assert set(serve_flags("chat_agent")) <= {*server.arguments, "full"}
    done = command(sys.executable, "examples/chat_agent.py", "--url", f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"turn \d+: (\d+) prompt tokens, (\d+) cached", done.stdout)
    tokens, cached = ([int(number) for number in column] for column in zip(*turns, strict=True))
    assert len(turns) == 8
    # Each turn finds all full blocks of the one before.
    assert all(now > before - 128 for now, before in zip(cached[1:], tokens, strict=False))
    assert eventually(lambda: server.metrics()['evictions_total{policy="ada-snapkv"}'] >= 8)


def test_every_example_is_listed():
    page = (ROOT / "docs/EXAMPLES.md").read_text()
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} == set(
        re.findall(r"\(\.\./(examples/\w+\.py)\)", page)
    )


@pytest.mark.engine
def test_readme_offline(tmp_path):
    (block,) = (block for block in blocks(README, "python") if "LLM(" in block)
    # What fits a test's machine besides.
    block = block.replace('"MODEL",', f'"{NEEDLE}", kv_cache_memory_bytes=1 << 28, enforce_eager=True,')
    script = tmp_path / "readme.py"
    script.write_text(block)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # In one process: that of the example before has the engine and its worker in processes of their own.
    done = command(sys.executable, script, PYTHONPATH=path, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert done.returncode == 0, done.stderr


def test_pictures(tmp_path):
    done = command(sys.executable, "docs/images/draw.py", tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs/images").glob("*.svg")}
