"""Who still waits for an answer when a server is stopped."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.utils.async_utils import run_in_loop
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_kvevict.engine import hooks
from vllm_kvevict.engine.config import options_of


@functools.cache
def install() -> None:
    """Give requests that outlive the engine an error when a server is stopped.

    vLLM 0.32 ends the engine's process ``--shutdown-timeout`` seconds (0 by default) after SIGTERM. What the engine has
    not answered by then nobody answers: the client waits, and the server waits for the client before it ends.
    """
    hooks.wrap("vllm.v1.engine.async_llm:AsyncLLM.shutdown", _with_last_words)


def _with_last_words(shutdown: Callable[..., None]) -> Callable[..., None]:
    def with_last_words(self: AsyncLLM, *args: Any, **kwargs: Any) -> None:
        shutdown(self, *args, **kwargs)
        # An object that was never built completely is shut down, too.
        handler = getattr(self, "output_handler", None)
        if handler is not None and options_of(self.vllm_config):
            run_in_loop(handler.get_loop(), self.output_processor.propagate_error, EngineDeadError())

    return with_last_words
