"""What the tests of the benchmarks share."""

from collections.abc import Callable

import pytest

from vllm_kvevict.kernels import processor


@pytest.fixture
def at_level(monkeypatch) -> Callable[[str], None]:
    """Lets this machine's processor pass for one of another level."""
    return lambda name: monkeypatch.setattr(processor, "level", lambda: name)
