"""What the engine needs of vLLM's two model runners, V1 and V2."""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_kvevict.engine import hooks

GATHER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state"
ZERO_BLOCKS = "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids"
IS_UNIFORM = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode"


class BatchOrder:
    """Which request each row of a step's batch is.

    The V2 runner puts it into the metadata of attention for some models only, so its order is noted where it is made.

    Args:
        runner: the worker's model runner, V1 or V2.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._names: list[str] = []
        self._is_noted = hasattr(runner, "req_states")
        if self._is_noted:
            hooks.wrap(GATHER, self._noting, of=runner)

    def _noting(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
            state, uniform_tokens = gather(*args, **kwargs)
            self._names = state.req_ids if state is not None else []
            return state, uniform_tokens

        return gather_batch_req_state

    def request_ids(self, num_reqs: int) -> list[str]:
        """Of the first rows."""
        names = self._names if self._is_noted else self._runner.input_batch.req_ids
        return list(names[:num_reqs])


def forbid_decode_graphs(runner: Any, when: Callable[[], bool]) -> None:
    """Keep steps out of the CUDA graphs of decodes, which run none of our Python code.

    A prompt whose last chunk has one token looks like a decode to both runners, but there is an eviction to do.

    Args:
        runner: the worker's model runner, V1 or V2.
        when: whether the running step is such a one.
    """

    def gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
            state, uniform_tokens = gather(*args, **kwargs)
            return state, None if when() else uniform_tokens

        return gather_batch_req_state

    def asking(is_uniform: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **kwargs: not when() and is_uniform(*args, **kwargs)

    if hasattr(runner, "req_states"):
        hooks.wrap(GATHER, gathering, of=runner)
    else:
        hooks.wrap(IS_UNIFORM, asking, of=runner)


def zero_new_windows(runner: Any) -> None:
    """Let windows begin with zeros in blocks that were states, which may be no numbers.

    On a CPU vLLM zeroes blocks through layers with full attention, and of those that it sees there are none.

    Args:
        runner: the worker's model runner on a CPU.
    """

    def zeroing(zero: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        def zero_block_ids(block_ids: list[int]) -> None:
            zero(block_ids)
            for group in runner.kv_cache_config.kv_cache_groups:
                layers = group.layer_names if isinstance(group.kv_cache_spec, SlidingWindowSpec) else ()
                for name in layers:
                    runner.compilation_config.static_forward_context[name].kv_cache[block_ids] = 0

        return zero_block_ids

    if hasattr(runner, "_zero_block_ids"):  # V1
        hooks.wrap(ZERO_BLOCKS, zeroing, of=runner)
