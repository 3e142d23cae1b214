"""Where Triton kernels run here, on a GPU or in Triton's interpreter, and what C++ kernels are compiled for."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.interpreting import interpreted
from vllm_kvevict.kernels import build, processor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    """Where a kernel's tensors must be."""
    return DEVICE


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Without a GPU, launches are interpreted while a module of this folder is tested."""
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture(params=[16, 8, 4])
def lanes(request, monkeypatch):
    """Vectors of this width, at the processor's level; the compiler takes apart those that are too wide for it."""
    name = processor.level()
    only = {name: replace(processor.levels()[name], lanes=request.param)}
    monkeypatch.setattr(processor, "levels", lambda: only)
    build._load.cache_clear()
    yield request.param
    build._load.cache_clear()


@pytest.fixture(params=list(processor.levels()))
def level(request, monkeypatch):
    """A level of this processor."""
    monkeypatch.setenv(processor.ENVIRONMENT, request.param)
    return request.param
