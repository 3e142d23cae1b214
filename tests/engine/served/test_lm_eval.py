"""lm-eval asks a server as docs/MEASURING-QUALITY.md says, and each request is evicted as it asks to be."""

import json
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, commands
from tests.engine.support.clients import evictions
from tests.engine.support.serving import ON_REQUEST, ForkedServer, command, log_evictions
from tests.real_model import real_model

pytestmark = pytest.mark.engine
SAMPLES = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    flags = [*ON_REQUEST, *log_evictions(log), "--max-model-len", "2048"]
    with ForkedServer(real_model(), log, *flags) as server:
        yield server


def score(server: ForkedServer, policy: str, folder: Path) -> float:
    """What the document's command finds with a policy."""
    (words,) = (found for found in commands(ROOT / "docs/MEASURING-QUALITY.md") if found[0] == "lm_eval")
    line = " ".join(words[1:-1]).replace("localhost:8000", f"127.0.0.1:{server.port}")
    fields = json.loads(words[-1])
    fields["vllm_xargs"]["kv_eviction"] = policy
    asked = [*line.replace("MODEL", server.model).split(), json.dumps(fields)]
    more = ["--limit", SAMPLES, "--output_path", folder]
    ended = command(sys.executable, "-m", "lm_eval", *asked, *map(str, more), HF_HOME=str(folder / "cache"))
    assert ended.returncode == 0, ended.stderr[-5000:]
    (results,) = folder.rglob("results_*.json")
    return json.loads(results.read_text())["results"]["needles"]["exact_match,number"]


def test_policies_are_compared_on_one_server(server, tmp_path):
    """What is hidden in the middle is found with what looks for it, and not with the first and the last tokens."""
    found = {}
    for policy in ("ada-snapkv", "streaming-llm"):
        start = len(server.evictions)
        found[policy] = score(server, policy, tmp_path / policy)
        lines = evictions(server, SAMPLES, start)
        assert {line["policy"] for line in lines} == {policy} and len(lines) == SAMPLES
        assert all(800 < line["tokens"] < 1000 for line in lines)
    assert found["ada-snapkv"] >= 0.8 and found["streaming-llm"] <= 0.2, found
