"""Tells what each eviction kept: a debug line for people, a line of JSON for programs. Owns their file."""

import json
import logging
from dataclasses import asdict

from vllm.logger import init_logger

from vllm_kvevict.schedules.reports import EvictionRecord

logger = init_logger("vllm.kv_eviction")


class EvictionLog:
    """Tells of each eviction.

    Args:
        path: file that gets a line of JSON for each eviction; None for no file.
    """

    def __init__(self, path: str | None):
        self.path = path
        self._has_failed = False

    def write(self, eviction: EvictionRecord) -> None:
        """Tell of an eviction; a file that cannot be written is warned of once, and tried again with the next."""
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", _for_people(eviction))
        if self.path is None:
            return
        try:
            # Opened for each line, so that the file may be moved away while the server runs.
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(eviction)) + "\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "KV eviction: --kv-eviction-config.eviction_log %r cannot be written (%s): lines are missing there",
                    self.path,
                    error.strerror,
                )
            self._has_failed = True


def _for_people(eviction: EvictionRecord) -> str:
    # Of an answer, what its rows held before is what earlier evictions left.
    before = 0 if eviction.phase == "decode" else eviction.tokens
    layers = "; ".join(
        f"layer {layer}: {sum(heads)}{f'/{len(heads) * before}' if before else ''} ({' '.join(map(str, heads))})"
        for layer, heads in enumerate(eviction.heads)
    )
    return (
        f"KV eviction: request {eviction.request} at {eviction.tokens} tokens by {eviction.policy}: "
        f"kept {eviction.kept}/{eviction.stored} entries, freed {eviction.freed_pages} pages, "
        f"held at most {eviction.held_pages}; kept per layer (per KV head): {layers}"
    )
