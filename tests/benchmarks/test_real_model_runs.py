"""The comparison on a real model, against a server that only pretends."""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from benchmarks import real_model
from benchmarks.harness.quality_columns import own_columns, split
from benchmarks.harness.quality_folders import cost, locked, pack, row, unpack
from benchmarks.harness.quality_hours import missing
from benchmarks.harness.server import ServerError
from benchmarks.real_model import parse_arguments, parts
from tests.quality.fake_openai import MODEL
from tests.quality.test_fidelity import FakeScorer
from vllm_kvevict.quality.__main__ import main as quality
from vllm_kvevict.quality.fidelity import ANSWERS, FIDELITY, Fidelity
from vllm_kvevict.quality.results import RESULTS, Column, Result, ResultsError, read
from vllm_kvevict.quality.scores import Scores

TUNED = "snapkv:kernel=31"


def titles(tmp_path) -> list[str]:
    lines = (tmp_path / "real" / "table.md").read_text().splitlines()
    return [line for line in lines if line.startswith("## ")]


def arguments(tmp_path, *more: str, policies=("snapkv",)):
    words = ["--model", f"/models/{MODEL}", "--output", str(tmp_path / "real"), "--policies", *policies]
    words += ["--budgets", "0.2", "--scopes", "prompt", "--tokens", "300", "--tasks", "number"]
    found = parse_arguments([*words, "--samples", "2", "--fidelity-samples", "1", *more])
    # The pretended server does not know the control.
    found.policies = [policy for policy in found.policies if policy != real_model.CONTROL]
    return found


class Servers:
    """Starts pretended servers, and remembers with which flags."""

    def __init__(self, **settings):
        self.settings, self.flags, self.asked, self.running = settings, [], 0, 0

    @asynccontextmanager
    async def __call__(self, arguments, eviction):
        self.flags.append(list(eviction))
        with FakeScorer(**self.settings) as server:
            self.running += 1
            try:
                yield server.url
            finally:
                self.running -= 1
                self.asked += len(server.asked)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Commands run in a thread of this process, which starts faster."""

    async def run(words):
        if code := await asyncio.to_thread(quality, words):
            raise ServerError(f"exit code {code}")

    monkeypatch.setattr(real_model, "quality", run)


def run(servers: Servers, given) -> None:
    async def everything():
        await real_model.run(given, servers)

    asyncio.run(everything())
    assert servers.running == 0


def test_measures_once_and_compresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    servers, given = Servers(), arguments(tmp_path)
    run(servers, given)
    folder = tmp_path / "real" / "300-prompt"
    names = {path.name for path in folder.iterdir()}
    assert {f"{name}.xz" for name in (RESULTS, ANSWERS, FIDELITY)} | {"report.md"} <= names
    assert not names & {RESULTS, ANSWERS, FIDELITY}
    settings = (folder / "settings.json").read_text()
    assert json.loads(settings)["model"] == MODEL and "--output real/300-prompt" in settings
    assert str(tmp_path) not in settings
    table = (tmp_path / "real" / "table.md").read_text()
    assert "## 300 tokens, scope prompt" in table and "| snapkv | 0.2 |" in table
    before = servers.asked
    run(servers, given)
    # Nothing but whether the server evicts is asked again.
    assert before > 8 and servers.asked == before
    unpack(folder)
    assert {result.column for result in read(folder / RESULTS, Result)} == {
        Column("full"),
        Column("snapkv", 0.2, "prompt"),
    }


@pytest.mark.parametrize("tunes", [True, False])
def test_policies_with_parameters_get_servers_of_their_own_only_where_requests_cannot_set_them(
    tmp_path, tunes
):
    servers = Servers(tunes=tunes)
    run(servers, arguments(tmp_path, policies=("snapkv", TUNED)))
    shared = ["--kv-eviction", "full", "--kv-eviction-config.policies", "all"]
    own = ["--kv-eviction", "snapkv", "--kv-eviction-config.kernel", "31"]
    assert servers.flags == ([shared] if tunes else [shared, own])
    folder = tmp_path / "real" / "300-prompt"
    unpack(folder)
    name = TUNED if tunes else "snapkv@kernel=31"
    assert {result.policy for result in read(folder / RESULTS, Result)} == {"full", "snapkv", name}
    assert {one.policy for one in read(folder / FIDELITY, Fidelity)} == {"full", "snapkv", name}
    assert f"| {name} | 0.2 |" in (tmp_path / "real" / "table.md").read_text()


def test_continues_after_an_error(tmp_path, monkeypatch):
    given, refuse = arguments(tmp_path), real_model.quality
    servers = Servers()

    async def fails_at_questions(words):
        if words[0] == "run":
            raise ServerError("ended")
        await refuse(words)

    with monkeypatch.context() as patch:
        patch.setattr(real_model, "quality", fails_at_questions)
        with pytest.raises(ServerError):
            run(servers, given)
    folder = tmp_path / "real" / "300-prompt"
    assert servers.running == 0 and (folder / f"{FIDELITY}.xz").exists() and not (folder / FIDELITY).exists()
    again = Servers()
    run(again, given)
    assert (folder / f"{RESULTS}.xz").exists()
    assert again.asked == 4  # the questions alone


def test_hours_are_those_that_are_left(tmp_path, monkeypatch):
    given, out = arguments(tmp_path, policies=("snapkv", "kvzip", "take")), io.StringIO()
    (part,) = parts(given)
    # One task with 2 questions for 4 columns, and 4 tasks with an answer for 3 of them; kvzip's are read twice.
    assert missing(given, part) == (8 + 2 + 12 + 4, 20)
    run(Servers(), arguments(tmp_path))
    unpack(part.folder)
    assert missing(given, part) == (4 + 2 + 4 + 4, 8)
    servers = Servers()
    monkeypatch.setattr(real_model, "console", Console(file=out, width=200))
    run(servers, arguments(tmp_path, "--dry-run", policies=("snapkv", "ada-snapkv")))
    assert servers.asked == 1 and "hours in all" in out.getvalue()


def test_the_seed_of_tuning_is_another_and_its_results_are_kept_apart():
    published, tuning = parse_arguments([]), parse_arguments(["--tune"])
    assert published.seed != tuning.seed and published.output != tuning.output
    assert tuning.output.is_relative_to(real_model.SCRATCH)
    assert published.policies[:2] == ["full", "streaming-llm"] and "take" not in published.policies
    assert parse_arguments(["--seed", "5"]).seed == 5


def test_unknown_tasks_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--tasks", "no-such"])
    assert "--tasks: unknown no-such" in capsys.readouterr().err


def test_names_of_servers_of_their_own():
    plain, tuned = split(["full", "ada-snapkv:rows=max,kernel=9@wide"])
    (own,) = own_columns(tuned)
    assert plain == ["full"] and own.label == "ada-snapkv@rows=max,kernel=9 wide"
    flags = "--kv-eviction ada-snapkv --kv-eviction-config.rows max --kv-eviction-config.kernel 9"
    assert own.flags == flags.split()


def test_what_a_killed_run_left_is_newer(tmp_path):
    (tmp_path / RESULTS).write_text("old\n")
    pack(tmp_path)
    assert not (tmp_path / RESULTS).exists()
    (tmp_path / RESULTS).write_text("new\n")
    unpack(tmp_path)
    assert (tmp_path / RESULTS).read_text() == "new\n"
    pack(tmp_path)
    unpack(tmp_path)
    assert (tmp_path / RESULTS).read_text() == "new\n"


def test_two_runs_cannot_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ResultsError, match="another run"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def measured(index: int, column: Column, seconds: float) -> Fidelity:
    return Fidelity(
        *("text/number", 300, None, index, column.policy, column.budget, column.scope),
        first=1,
        agrees=(True,),
        differences=(0.0,),
        divergences=(0.0,),
        prompt_tokens=300,
        evict_at=300,
        whole=False,
        seconds=seconds,
    )


def test_cost_is_paired():
    full, other = Column("full"), Column("snapkv", 0.2, "prompt")
    measures = [measured(index, full, seconds) for index, seconds in enumerate((1.0, 10.0, 2.0))]
    measures += [measured(index, other, seconds) for index, seconds in enumerate((1.1, 11.0, 4.0))]
    assert cost(measures, other) == pytest.approx(0.1) and cost(measures, full) == 0
    assert cost(measures[:3], other) is None


def test_the_table_keeps_what_earlier_runs_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tokens in ("300", "600", "300"):
        run(Servers(), arguments(tmp_path, "--tokens", tokens))
        page = (tmp_path / "real" / "table.md").read_text()
    assert titles(tmp_path) == ["## 300 tokens, scope prompt", "## 600 tokens, scope prompt"]
    assert page.count("| snapkv | 0.2 |") == 2 and "\n\n\n" not in page


def test_a_policy_that_had_some_of_the_tasks_says_so():
    def result(task, policy, budget=None):
        values = dict.fromkeys(Result.__dataclass_fields__) | {
            "task": task,
            "policy": policy,
            "budget": budget,
        }
        return Result(**values | {"length": 300, "index": 0, "score": 1.0})

    results = [result(task, "full") for task in ("text/number", "text/json")]
    results += [result("text/json", "kvzip", 0.2), *(result(r.task, "snapkv", 0.2) for r in results)]
    names = [row(Scores(results), None, Column(policy, 0.2))[0] for policy in ("kvzip", "snapkv")]
    assert names == ["kvzip (json only)", "snapkv"]
