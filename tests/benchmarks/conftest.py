"""What the tests of the benchmarks share."""

from collections.abc import Callable

import pytest

from vllm_kvevict.kernels import processor


@pytest.fixture
def at_level(monkeypatch) -> Callable[[str], None]:
    """Lets this machine's processor pass for one of another level, which with AVX-512 may have no bfloat16."""

    def pretend(name: str, converts: bool = False) -> None:
        monkeypatch.setattr(processor, "level", lambda: name)
        monkeypatch.setattr(
            processor, "multiplies_bfloat16", lambda: name in ("amx", "avx512", "generic") and not converts
        )

    return pretend
