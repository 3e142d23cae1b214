"""What tests of flags and of chats share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.support.chats import byte_renderers
from vllm_kvevict.engine.frontend import command_line


@pytest.fixture(autouse=True)
def _python_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a command line makes the process a command; here it ends with each test."""
    monkeypatch.setattr(command_line, "_on_command_line", False)


@pytest.fixture
def model(models: Callable[..., Any]) -> str:
    return str(models("llama"))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes the renderer of a server with some options, whose tokens are bytes."""
    with byte_renderers(tmp_path_factory.mktemp("models") / "bytes") as get:
        yield get
