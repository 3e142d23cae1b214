"""What tests of servers share."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

collect_ignore = [] if torch.cuda.is_available() else ["test_cuda_graphs.py"]


@pytest.fixture(scope="module")
def model(models) -> Path:
    """A model whose heads and layers two ranks or stages can share."""
    return models("llama", heads=8, kv_heads=4, layers=4)


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    """The official client of a module's own `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client
