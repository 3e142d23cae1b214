"""`quality run --scopes turns` against a server that compresses chats turn by turn."""

import pytest

from benchmarks.quality import NEEDLE
from tests.engine.support.clients import evictions
from tests.engine.support.serving import ForkedServer, log_evictions
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.results import RESULTS, Column, Result, read

pytestmark = pytest.mark.engine
POLICY, BUDGET, SAMPLES = "streaming-llm", 0.25, 3


def test_the_turns_of_chats_are_evicted_and_scored(tmp_path):
    log = tmp_path / "log"
    flags = ["--kv-eviction", POLICY, "--kv-eviction-config.scope", "turns", *log_evictions(log)]
    asked = ["--tasks", "single", "--lengths", "300", "--samples", str(SAMPLES), "--seed", "1"]
    asked += ["--policies", "full", POLICY, "--budgets", str(BUDGET), "--scopes", "turns", "prefix"]
    with ForkedServer(NEEDLE, log, *flags) as server:
        url = ["--url", f"{server.url}/v1", "--output", str(tmp_path / "out")]
        assert quality.main(["run", *url, *asked]) == 0
        lines = evictions(server, 2 * SAMPLES, 0)
    found = list(read(tmp_path / "out" / RESULTS, Result))
    by_column = {
        column: [r for r in found if r.column == column]
        for column in (Column("full"), *(Column(POLICY, BUDGET, scope) for scope in ("turns", "prefix")))
    }
    assert [len(results) for results in by_column.values()] == [SAMPLES] * 3
    full, turns, _ = ([r.score for r in results] for results in by_column.values())
    assert sum(full) > sum(turns)
    # A document is a turn of its own; scope prefix may end a few tokens later, behind the mark of the user.
    of_turns = sorted(r.evict_at for r in by_column[Column(POLICY, BUDGET, "turns")])
    ends = sorted(line["tokens"] for line in lines)
    assert all(0 <= evict_at - end <= 8 for evict_at, end in zip(of_turns, ends[::2], strict=True))
