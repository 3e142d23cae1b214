"""Processes that die under load, a server that is told to stop, a pool that answers outgrow: no hang, nothing left."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.engine.clients import eventually, text_of, words
from tests.engine.serving import Server

pytestmark = pytest.mark.engine

PATIENCE = 45
"""Seconds within which a client must hear of a fault, and after which no process may be left."""
FLAGS = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2", "--kv-eviction-config.min_prompt", "0"]
FLAGS += ["--kv-eviction-config.decode_reserve", "8", "--dtype", "float32", "--enforce-eager"]
# Memory for one request of the longest kind and a half; few events, which cost the clients more than the server.
FLAGS += ["--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", "32"]
FLAGS += ["--num-gpu-blocks-override", "96", "--stream-interval", "32"]
CLIENTS = 12


@pytest.fixture
def server(models, tmp_path, request) -> Iterator[Server]:
    model, more = models("llama", layers=2, max_len=2048), getattr(request, "param", [])
    with Server(model, tmp_path / "log", *FLAGS, *more, env={"VLLM_KVEVICT_CHECK": "1"}) as server:
        yield server


@dataclass(frozen=True)
class Heard:
    """What a client heard in the end: how it finished ("length", "abort"), "error", "cut" or "silence"; when."""

    what: str
    seconds: float


def listen(client: httpx.Client, model: str, index: int, begun: Event) -> Heard:
    """Ask for a long answer, every other time as a stream, and listen to the end."""
    body = {"model": model, "prompt": words(300, index), "max_tokens": 1700, "ignore_eos": True}
    what = "cut"
    try:
        with client.stream("POST", "/v1/completions", json=body | {"stream": index % 2 == 0}) as answer:
            for line in answer.iter_lines():
                if line.startswith(("{", "data: {")):
                    what = how_it_ends(json.loads(line.removeprefix("data: "))) or what
                    begun.set()
                elif line == "data: [DONE]" and what == "cut":  # all that vLLM says if there was no token yet
                    what = "abort"
    except httpx.TimeoutException:
        what = "silence"
    except httpx.TransportError:  # the connection was refused or cut
        what = "error"
    return Heard(what, time.monotonic())


def how_it_ends(event: dict[str, Any]) -> str | None:
    return "error" if "error" in event else event["choices"][0]["finish_reason"]


def processes(server: Server) -> list[psutil.Process]:
    """The server and everything that it has started."""
    front = psutil.Process(server.process.pid)
    return [front, *front.children(recursive=True)]


@contextmanager
def under_load(server: Server) -> Iterator[list[Future[Heard]]]:
    """Clients of which one has heard the beginning of an answer, and more of them than the pool holds."""
    begun = Event()
    with (
        httpx.Client(base_url=server.url, timeout=2 * PATIENCE) as client,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        heard = [threads.submit(listen, client, server.model, index, begun) for index in range(CLIENTS)]
        assert begun.wait(PATIENCE)
        yield heard


def assert_over(
    server: Server, family: list[psutil.Process], heard: list[Future[Heard]], since: float, *ends: str
) -> None:
    """Every client heard one of these ends in time, no process is left, and nobody listens at the port."""
    outcomes = [future.result(2 * PATIENCE) for future in heard]
    assert {outcome.what for outcome in outcomes} <= set(ends)
    assert max(outcome.seconds for outcome in outcomes) - since < PATIENCE
    server.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=PATIENCE)


@pytest.mark.parametrize("name", ["VLLM::Worker", "VLLM::EngineCore"])
def test_a_process_is_killed(name, server):
    family = processes(server)
    (victim,) = (process for process in family if process.name().startswith(name))
    with under_load(server) as heard:
        since = time.monotonic()
        victim.kill()
        assert_over(server, family, heard, since, "error")
    assert "EngineDeadError" in server.log


@pytest.mark.parametrize("server", [[], ["--shutdown-timeout", "1"]], indirect=True, ids=["at-once", "later"])
def test_told_to_stop(server):
    """Answers take longer than the second that the engine may have for them."""
    family = processes(server)
    with under_load(server) as heard:
        since = time.monotonic()
        server.process.terminate()
        assert_over(server, family, heard, since, "abort", "error")
    assert server.process.returncode == 0


def test_answers_outgrow_the_pool(server):
    prompts = [words(200, seed) for seed in range(10)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:

        def ask(prompt: str) -> str:
            return text_of(client, prompt, 400)

        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(ask, prompts))
        assert preemptions(server) > 0
        # The youngest was preempted if anyone was.
        chosen = [0, 4, 9]
        assert [ask(prompts[index]) for index in chosen] == [together[index] for index in chosen]
    assert eventually(lambda: server.metrics()['physical_pages{rank="0"}'] == 0)
    assert "Traceback" not in server.log


def preemptions(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_preemptions_total")
    )
