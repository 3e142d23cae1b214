"""The commands of README and docs, as written, in a reader's environment: with the wheel, none of the tests' variables,
and outside the checkout, but for commands of the checkout. The table says which of them run; programs parse the others.
"""

import contextlib
import functools
import json
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.server import end
from tests.distribution.environment import Environment
from tests.documents import DOCUMENTS, ROOT, block_lines, blocks, commands, words_of
from tests.engine.support.clients import eventually
from tests.engine.support.serving import ForkedServer
from vllm_kvevict.quality.tasks import make

NEEDLE = ROOT / "benchmarks/quality/needle"
SERVER = "localhost:8000"
INSPECTED = blocks(ROOT / "docs/INSPECT.md", "text")[0]


@dataclass(frozen=True)
class Run:
    """How a command runs.

    Attributes:
        more: words behind it, which make it smaller.
        shows: part of what it prints.
        writes: a file, and part of what is in it.
    """

    more: str = ""
    shows: str = ""
    writes: tuple[str, str] = ("", "")


ON_CHATS, ON_TEXT = "--tasks turns-number --samples 1", "--tasks number --samples 1"
ON_ANSWERS = "--tasks recall --samples 1 --answer-tokens 400 --budgets 32"
REPORT = "vllm-kvevict quality report out --output report.md"

TABLE: dict[str, dict[str, Run]] = {
    "README.md": {
        "pip install vllm_kvevict": Run(),
        "vllm serve MODEL": Run(),
        "curl": Run(),
        "vllm complete": Run(f"--url http://{SERVER}/v1"),
        "vllm-kvevict inspect": Run(shows="lava keeps", writes=("inspect.html", "")),
    },
    "DESCRIPTION.md": {"vllm-kvevict policies": Run(shows="ada-snapkv")},
    "CONFIGURATION.md": {"vllm-kvevict sizing": Run(shows="  with tail\n")},
    "EXAMPLES.md": {
        "python examples/offline.py": Run(shows="evicted_tokens "),
        "python examples/decide.py": Run(shows="kept"),
    },
    "INSPECT.md": {
        "vllm-kvevict inspect MODEL --chat": Run(shows=INSPECTED, writes=("inspect.html", "")),
    },
    "MEASURING-QUALITY.md": {
        "vllm-kvevict quality fidelity": Run(),
        f"{REPORT}$": Run(writes=("report.md", "snapkv")),
        "vllm-kvevict quality run * --tokens 1024 --policies": Run(ON_TEXT),
        "vllm-kvevict quality run * --family chats": Run(ON_CHATS),
        f"{REPORT} --budget": Run(writes=("report.md", "kvzip")),
        "vllm-kvevict quality answers": Run(ON_ANSWERS),
        "vllm-kvevict quality run --url * --output out --min-prompt": Run(
            "--tasks single --samples 1 --lengths 512"
        ),
    },
    "POLICIES.md": {"python examples/custom_policy.py": Run(shows="keeps")},
    "TROUBLESHOOTING.md": {"vllm-kvevict doctor": Run(shows="can be served")},
}
"""By document: how each command that runs begins (`*` stands for some words, `$` for its end). Other servers are
forked, with the model of the tests, where later commands of their document ask one."""


def name_of(document: Path) -> str:
    return "docker/README.md" if document.parent.name == "docker" else document.name


def rows_of(document: Path, words: list[str]) -> list[str]:
    """Rows of the table that a command has."""
    patterns = {
        row: re.escape(row).replace(r"\*", ".*").replace(r"\$", "$")
        for row in TABLE.get(name_of(document), {})
    }
    return [row for row, pattern in patterns.items() if re.match(pattern, " ".join(words))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_each_row_has_a_command(document: Path) -> None:
    found = {" ".join(words): rows_of(document, words) for words in commands(document)}
    assert [command for command, rows in found.items() if len(rows) > 1] == []
    assert sorted(row for rows in found.values() for row in rows) == sorted(TABLE.get(name_of(document), {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, built) -> Path:
    """Where a reader is, with what commands name: the wheel, a small model, texts, chats."""
    here = tmp_path_factory.mktemp("reader")
    shutil.copy(built.wheel, here)
    shutil.copytree(NEEDLE, here / "MODEL")
    config = json.loads((NEEDLE / "config.json").read_text())
    (here / "MODEL/config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    for name in ("FILE", "LONG_TEXT"):
        (here / name).write_text("what is kept of a text like this one ? " * 60)
    (here / "prompts.jsonl").write_text("\n".join(blocks(ROOT / "docs/MEASURING-QUALITY.md", "json")))
    begin = [said("system", 1, 400), said("user", 2, 150), said("assistant", 3, 150), said("user", 4, 200)]
    for name, answer in (("chat", said("assistant", 6, 80)), ("branch", said("assistant", 7, 120))):
        chat = [*begin, answer, {"role": "user", "content": "what is kept ?"}]
        (here / f"{name}.json").write_text(json.dumps(chat))
    return here


def said(role: str, number: int, words: int) -> dict[str, str]:
    """A message in the small model's words."""
    sample = make("single", words, random.Random(number))
    return {"role": role, "content": f"{sample.context} {sample.question}"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Environment:
    """Without this project, and then with it, as README installs it."""
    new = Environment(tmp_path_factory.mktemp("environment") / "new")
    before = versions(new, folder)
    assert "vllm-kvevict" not in str(before)
    (install,) = (words for words in commands(ROOT / "README.md") if words[:2] == ["pip", "install"])
    new.run(" ".join(install), folder)
    # Nothing of vLLM's environment was replaced, nothing else came.
    assert {line.split("==")[0] for line in versions(new, folder) ^ before} == {"vllm-kvevict"}
    return new


def versions(environment: Environment, folder: Path) -> set[str]:
    return set(environment.run("pip list --format freeze --disable-pip-version-check", folder).splitlines())


def test_what_is_installed_comes_from_the_wheel(environment: Environment, folder: Path) -> None:
    where = "import vllm_kvevict; print(vllm_kvevict.__file__)"
    assert environment.run(f"python -c '{where}'", folder).startswith(str(environment.packages))
    assert {path.name for path in environment.packages.glob("vllm*")} >= {"vllm_kvevict"}
    assert not (environment.packages / "vllm").exists()


def test_programs_parse_the_others(environment: Environment, folder: Path) -> None:
    parsed = [words for document in DOCUMENTS for words in commands(document) if not rows_of(document, words)]
    wrong = [
        ["vllm", "serve", "MODEL", "--kv-evict"],
        ["vllm-kvevict", "sizing", "--modell"],
        ["make", "tea"],
    ]
    said = environment.run(
        f"python {Path(__file__).with_name('parsing.py')}", folder, json.dumps(parsed + wrong)
    )
    complaints = json.loads(said.splitlines()[-1])
    assert all(complaints[len(parsed) :])
    assert not "\n".join(filter(None, complaints[: len(parsed)]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def counted_evictions(port: int) -> float:
    """Evictions that the server's metrics count, of all policies."""
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    counts = re.findall(r"^vllm:kv_eviction_evictions_total\{.*\} (.*)$", metrics, re.M)
    return sum(map(float, counts))


@dataclass
class Reader:
    """Who types a document's commands, one after another."""

    environment: Environment
    folder: Path
    servers: contextlib.ExitStack
    start: Callable[[], int] | None = None
    port: int = 0

    def read(self, document: Path) -> None:
        for block in blocks(document):
            shutil.rmtree(self.folder / "out", ignore_errors=True)  # a block's commands belong together
            for line in block_lines(block):
                rows = rows_of(document, words_of(line))
                self.type(line, TABLE[name_of(document)][rows[0]] if rows else None)

    def type(self, line: str, how: Run | None) -> None:
        words = words_of(line)
        if words[:2] == ["vllm", "serve"]:
            self.servers.close()
            self.start = functools.partial(self.serve if how else self.fork, line)
        elif how and words[:2] != ["pip", "install"]:  # which the environment has begun with
            self.run(line, how)

    def run(self, line: str, how: Run) -> None:
        line = f"{line.split('  #')[0]} {how.more}"
        if SERVER in line and self.start:
            self.port, self.start = self.start(), None
        # Of the checkout are its scripts.
        here = ROOT if line.startswith("python ") else self.folder
        name, text = how.writes
        (self.folder / (name or "nothing")).unlink(missing_ok=True)
        shown = self.environment.run(line.replace(SERVER, f"127.0.0.1:{self.port}"), here)
        assert how.shows in shown, shown
        assert not name or text in (self.folder / name).read_text()

    def serve(self, line: str) -> int:
        """Start a server as written, but for its port; what is asked of it is evicted."""
        port, log = free_port(), self.folder / "log"
        server = self.environment.serve(f"{line.removesuffix('&')} --port {port}", log)
        self.servers.callback(lambda: print(log.read_text()[-5000:]))
        self.servers.callback(end, server)
        self.servers.callback(lambda: check(eventually(lambda: counted_evictions(port) > 0)))
        return port

    def fork(self, line: str) -> int:
        """Start the server of the tests with a command's flags."""
        flags = [*words_of(line)[3:], "--enforce-eager", "--dtype", "float32"]
        server = ForkedServer(self.folder / "MODEL", self.folder / "log", *flags)
        return self.servers.enter_context(server).port


def check(holds: bool) -> None:
    assert holds


RUNNING = [document for document in DOCUMENTS if name_of(document) in TABLE]


@pytest.fixture
def reader(environment: Environment, folder: Path) -> Iterator[Reader]:
    with contextlib.ExitStack() as servers:
        yield Reader(environment, folder, servers)


@pytest.mark.engine
@pytest.mark.parametrize("document", RUNNING, ids=name_of)
def test_commands_run(document: Path, reader: Reader) -> None:
    reader.read(document)
