"""One real server, started as the images start it, and what it shows after one evicted request."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.harness.models import make_model
from tests.engine.support.clients import eventually, words
from tests.engine.support.serving import ROOT, VLLM, Server

ENTRYPOINT = ROOT / "docker/entrypoint.sh"


@dataclass
class Evicted:
    """A server that has evicted one request, and its ``/metrics`` afterwards."""

    server: Server
    page: str


@pytest.fixture(scope="session")
def evicted(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("image")
    model = make_model(folder / "model")
    # An argument repeated by the container wins over the entrypoint's: tests listen to this machine alone.
    flags = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    server = Server(model, folder / "log")
    server.arguments = [str(ENTRYPOINT), *flags]
    server.environment |= {
        "PATH": f"{Path(VLLM).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": server.model,
        "PORT": str(server.port),
        "KV_EVICTION": "ada-snapkv",
        "KV_BUDGET": "0.2",
        "KV_EVICTION_CONFIG": '{"min_prompt": 64}',
    }
    with server:
        body = {"model": server.model, "prompt": words(400), "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()

        def shown() -> str | None:
            page = httpx.get(f"{server.url}/metrics", timeout=60).text
            counted = re.search(r'^vllm:request_success_total\{.*"length".*\} 1\.0$', page, re.M)
            return page if counted and "physical_pages{" in page else None

        page = eventually(shown)
        assert page, server.log[-3000:]
        yield Evicted(server, page)
