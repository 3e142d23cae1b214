"""Processes that die under load, a server that is told to stop, a pool that answers outgrow: no hang, nothing left."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.engine.support.clients import complete, eventually, idle, text_of, words
from tests.engine.support.serving import ForkedServer, Server

pytestmark = pytest.mark.engine

PATIENCE = 60
"""Seconds within which a client must hear of a fault, and after which no process may be left."""
FLAGS = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2", "--kv-eviction-config.min_prompt", "0"]
FLAGS += ["--kv-eviction-config.decode_reserve", "8", "--dtype", "float32", "--enforce-eager"]
# Few events, which cost the clients more than the server.
FLAGS += ["--max-num-seqs", "16", "--block-size", "32", "--stream-interval", "32"]
# Memory for one request of the longest kind and a half.
LONG = ["--max-model-len", "16384", "--num-gpu-blocks-override", "768"]
SHORT = ["--max-model-len", "2048", "--num-gpu-blocks-override", "96"]
CLIENTS, PROMPT, ANSWER = 12, 2500, 13_800
"""Prompts that do not fit together, and answers of a minute: nobody may be done before a fault on a slow machine."""


@pytest.fixture
def server(models, tmp_path, request) -> Iterator[Server]:
    model = models("llama", layers=2, max_len=16384)
    # How a server ends is seen on one that was started as users do.
    kind = Server if request.function is test_told_to_stop else ForkedServer
    with kind(model, tmp_path / "log", *FLAGS, *request.param, env={"VLLM_KVEVICT_CHECK": "1"}) as server:
        yield server


Heard = tuple[str, float]
"""How a client's answer ended ("length", "abort"), or "error", "cut" or "silence"; and when."""


def listen(client: httpx.Client, model: str, index: int, begun: Event) -> Heard:
    """Ask for a long answer, every other time as a stream, and listen to the end."""
    body = {"model": model, "prompt": words(PROMPT, index), "max_tokens": ANSWER, "ignore_eos": True}
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
    return what, time.monotonic()


def how_it_ends(event: dict[str, Any]) -> str | None:
    return "error" if "error" in event else event["choices"][0]["finish_reason"]


def processes(server: Server) -> list[psutil.Process]:
    """The server and everything that it has started."""
    front = psutil.Process(server.process.pid)
    return [front, *front.children(recursive=True)]


def of_its_log(server: Server, name: str) -> int:
    """The first process of that kind whose name stands before a line of the log."""
    return int(re.search(rf"^\({name}\w* pid=(\d+)\)", server.log, re.M)[1])


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
    whats, seconds = zip(*(future.result(2 * PATIENCE) for future in heard), strict=True)
    assert set(whats) <= set(ends)
    assert max(seconds) - since < PATIENCE
    server.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=PATIENCE)


@pytest.mark.parametrize(
    "server, name",
    [
        (LONG, "EngineCore"),
        (LONG, "Worker"),
        ([*LONG, "--tensor-parallel-size", "2"], "Worker"),
        ([*LONG, "--pipeline-parallel-size", "2"], "Worker"),
    ],
    indirect=["server"],
    ids=["engine", "worker", "one-of-two-ranks", "one-of-two-stages"],
)
def test_a_process_is_killed(server, name):
    family = processes(server)
    victim = next(process for process in family if process.pid == of_its_log(server, name))
    with under_load(server) as heard:
        since = time.monotonic()
        victim.kill()
        assert_over(server, family, heard, since, "error")
    assert "EngineDeadError" in server.log


@pytest.mark.parametrize(
    "server", [LONG, [*LONG, "--shutdown-timeout", "1"]], indirect=True, ids=["at-once", "later"]
)
def test_told_to_stop(server):
    """Answers take longer than the second that the engine may have for them."""
    family = processes(server)
    with under_load(server) as heard:
        since = time.monotonic()
        server.process.terminate()
        assert_over(server, family, heard, since, "abort", "error")
    assert server.process.returncode == 0


@pytest.mark.parametrize("server", [SHORT], indirect=True, ids=["pool"])
def test_answers_outgrow_the_pool(server):
    prompts = [words(200, seed) for seed in range(10)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        # One HTTP request, so that all are in the engine at once however slow the machine is.
        together = complete(client, prompts, 400).choices
        assert [answer.index for answer in together] == list(range(len(prompts)))
        assert server.snapshot().preemptions > 0
        for index in (0, 4, 9):  # the youngest was preempted if anyone was
            assert text_of(client, prompts[index], 400) == together[index].text
    assert eventually(lambda: idle(server))
    assert "Traceback" not in server.log
