"""Engines in this folder run inside the test process, their workers forked from it: that starts in seconds."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # tests send functions into workers
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several workers on one NUMA node
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.models import make_model
from tests.engine.support.quick_starts import quick_starts


@pytest.fixture(scope="session", autouse=True)
def _engines_start_quickly() -> Iterator[None]:
    with quick_starts():
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Makes a model and remembers it: ``models("llama", kv_heads=4)`` gives its folder."""
    root: Path = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(architecture: str = "llama", **settings) -> Path:
        name = architecture + "".join(f"-{key}-{value}" for key, value in sorted(settings.items()))
        if name not in made:
            made[name] = make_model(root / name, architecture, **settings)
        return made[name]

    return get
