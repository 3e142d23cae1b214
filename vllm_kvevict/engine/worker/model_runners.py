"""What the engine needs of vLLM's two model runners, V1 and V2."""

from collections.abc import Callable
from typing import Any


def batch_request_ids(runner: Any, common: Any) -> list[str]:
    """Request ids in the order of the batch rows.

    Args:
        runner: the worker's model runner, V1 or V2.
        common: vLLM's CommonAttentionMetadata of the step.
    """
    if hasattr(runner, "req_states"):
        names = runner.req_states.index_to_req_id
        return [names[int(index)] for index in common.req_idx[: common.num_reqs]]
    return list(runner.input_batch.req_ids[: common.num_reqs])


def forbid_decode_graphs(runner: Any, when: Callable[[], bool]) -> None:
    """Keep steps out of the CUDA graphs of decodes, which run none of our Python code.

    A prompt whose last chunk has one token looks like a decode to both runners, but there is an eviction to do.

    Args:
        runner: the worker's model runner, V1 or V2.
        when: whether the running step is such a one.
    """
    if hasattr(runner, "req_states"):
        gather = runner.gather_batch_req_state

        def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
            state, uniform_tokens = gather(*args, **kwargs)
            return state, None if when() else uniform_tokens

        runner.gather_batch_req_state = gather_batch_req_state
    else:
        is_uniform = runner._is_uniform_decode
        runner._is_uniform_decode = lambda *args, **kwargs: not when() and is_uniform(*args, **kwargs)
