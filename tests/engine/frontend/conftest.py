"""What tests of chats share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.support.chats import byte_renderers


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes the renderer of a server with some options, whose tokens are bytes."""
    with byte_renderers(tmp_path_factory.mktemp("models") / "bytes") as get:
        yield get
