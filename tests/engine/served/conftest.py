"""What tests of servers share."""

from collections.abc import Iterator

import openai
import pytest
import torch

collect_ignore = [] if torch.cuda.is_available() else ["test_cuda_graphs.py"]


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    """The official client of a module's own `server`."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client
