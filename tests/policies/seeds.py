"""Many seeds in one test: pytest's own work for a test takes longer than most seeds do."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def named(seed: int) -> Iterator[None]:
    """Name the seed in whatever fails with it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
