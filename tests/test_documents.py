"""Every command in README and docs exists and takes the options it is shown with; what it does is tested elsewhere."""

import contextlib
import functools
import io
import itertools
import re
import runpy
import sys

import pytest
from vllm.benchmarks.serve import add_cli_args as add_client_args
from vllm.entrypoints.cli.openai import CompleteCommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.documents import DOCUMENTS, ROOT, blocks, commands
from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import REQUEST_FIELDS

COMMANDS = [
    pytest.param(words, id=f"{document.name}: {' '.join(words)[:60]}")
    for document in DOCUMENTS
    for words in commands(document)
]
WAIT = "curl -s --retry 900 --retry-delay 1 --retry-connrefused http://localhost:8000/health"
"""Ends when the server that was started before answers."""

ELSEWHERE = ("docker", "ray", "pip", "curl", "git", "hadolint", "rm", "twine", "export", "cd", "kill", "ls")
"""Programs that are not this project's."""


@functools.cache
def _help(module: str) -> str:
    """What a module or script prints for --help."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [module, *module.split()[1:], "--help"])
        run = runpy.run_path if module.endswith(".py") else runpy.run_module
        with contextlib.suppress(SystemExit):
            run(module.split()[0], run_name="__main__")
    return out.getvalue()


def _check_options(module: str, words: list[str]) -> None:
    for word in words:
        if word.startswith("--"):
            option = re.split("[=.]", word)[0]
            known = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", _help(module))
            assert known, f"{option} is not in the help"


def _serve_parser() -> FlexibleArgumentParser:
    make_arg_parser = versions.load(versions.moves().make_arg_parser)
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("words", COMMANDS)
def test_command(words):
    program, *rest = words
    if program == "vllm" and rest[0] == "serve":
        _serve_parser().parse_args(rest[1:])
    elif program == "python" and rest[0] == "-m" and rest[1] == "pytest":
        assert (ROOT / rest[2].split("::")[0]).exists()
    elif program == "vllm" and rest[:2] == ["bench", "serve"]:
        parser = FlexibleArgumentParser()
        add_client_args(parser)
        assert set(parser.parse_args(rest[2:]).extra_body["vllm_xargs"]) <= {*REQUEST_FIELDS}
    elif program == "vllm" and rest[0] == "complete":
        CompleteCommand.add_cli_args(FlexibleArgumentParser()).parse_args(rest[1:])
    elif program == "vllm-kvevict" and rest[0] == "doctor":
        _serve_parser().parse_args(rest[1:])
    elif program == "vllm-kvevict":
        depth = 2 if rest[0] == "quality" else 1
        _check_options(" ".join(["vllm_kvevict", *rest[:depth]]), rest)
    elif program == "python" and rest[0] == "-m":
        _check_options(rest[1], rest)
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
        _check_options(rest[0], rest)
    elif program == "pytest":
        assert (ROOT / rest[0]).exists()
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert program in ELSEWHERE, f"nobody tests {program}"


def test_the_client_of_vllms_benchmarks_is_shown_with_fields():
    """It knows none of the flags, so its page must not say that it does."""
    words = next(
        words for words in commands(ROOT / "docs/CONFIGURATION.md") if words[:3] == ["vllm", "bench", "serve"]
    )
    assert "--extra-body" in words and not any(word.startswith("--kv-") for word in words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_who_starts_a_server_waits_for_it(document):
    for block in blocks(document):
        lines = block.replace("\\\n", " ").splitlines()
        for line, following in itertools.pairwise(lines):
            assert not line.endswith("&") or following == WAIT, f"before {following}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_who_starts_an_examples_server_waits_for_it(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert all(following == WAIT for line, following in itertools.pairwise(lines) if line.endswith("&"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_python_that_starts_an_engine_may_be_saved_as_a_file(document):
    for block in blocks(document, "python"):
        assert not re.search(r"\bLLM\(", block) or '\nif __name__ == "__main__":' in block


PAGES = [*DOCUMENTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
UNCLEAR = (
    "nothing behind them is evicted",
    "whose own policy cannot do with it",
    "parameters belong into",
    "an answer ends where the memory does",
    "of what is possible without saving prefill",
    "whose last tokens choose",
    "who outlives that is expected to double",
    "the mark goes with a recorded run",
    "and mended here",
    "what comes behind",
    "as of --kv-budget",
    "not to be told from",
    "lies on its good side",
    "who waits",
    "when the producer",
)
"""Phrases at which readers stumbled: each was replaced by a plain sentence."""


def unclear(text: str) -> list[str]:
    """The phrases of UNCLEAR in a text, also where lines or columns break them."""
    words = " ".join(re.sub(r"[|*`]", " ", text).lower().split())
    return [phrase for phrase in UNCLEAR if phrase in words]


def test_an_unclear_phrase_is_seen():
    assert unclear("Found by the soak, **and\nmended** here") == ["and mended here"]
    assert not unclear("found by the soak and fixed")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_unclear_phrase_is_left(page):
    assert not unclear(page.read_text())


def test_links_lead_somewhere():
    broken = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken
