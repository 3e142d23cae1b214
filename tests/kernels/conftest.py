"""Where this folder's Triton kernels run: on a GPU or, without one, in Triton's interpreter on CPU tensors."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.interpreting import interpreted

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
