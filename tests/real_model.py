"""The real checkpoint for tests: without it they are skipped, except under CI, where they fail."""

import os
from pathlib import Path

import pytest

from vllm_kvevict.quality import checkpoint


def real_model() -> Path:
    """Its folder."""
    found = checkpoint.find()
    if found is None:
        without = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        without(checkpoint.missing())
    assert found is not None
    return found
