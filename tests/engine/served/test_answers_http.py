"""Answers that are evicted while they are written, over HTTP: through every endpoint, in metrics, and refusals."""

import re

import httpx
import pytest

from tests.engine.support.clients import eventually, idle, text_of, words
from tests.engine.support.serving import ForkedServer

pytestmark = pytest.mark.engine

BUDGET, INTERVAL = 48, 32


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ["--kv-eviction", "full", "--kv-decode-budget", str(BUDGET)]
    flags += ["--kv-eviction-config.decode_interval", str(INTERVAL)]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    flags += ["--num-gpu-blocks-override", "20"]
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(models("llama"), log, *flags, env={"VLLM_KVEVICT_CHECK": "1"}) as server:
        yield server


def evictions_of_answers(server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r'^vllm:kv_eviction_evictions_total\{[^}]*phase="decode"[^}]*\} (\S+)$', text, re.M)
    return sum(map(float, found))


def test_long_answers(server, client) -> None:
    """Evicted as often as their length says; the same as a whole one up to the first time, and not always after it."""
    before, length = evictions_of_answers(server), 200
    whole = text_of(client, words(100), length, {"kv_decode_budget": 0}).split()
    assert evictions_of_answers(server) == before
    short = text_of(client, words(100), BUDGET + INTERVAL).split()
    assert evictions_of_answers(server) == before
    evicted = text_of(client, words(100), length).split()
    # The last token of an answer is not stored.
    times = (length - 1 - BUDGET) // INTERVAL
    assert eventually(lambda: evictions_of_answers(server) == before + times)
    same = BUDGET + INTERVAL
    assert len(whole) == len(evicted) == length and len(short) == same
    assert evicted[:same] == whole[:same] == short and evicted != whole
    assert eventually(lambda: idle(server))
