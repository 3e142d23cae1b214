"""Which batch row is which request, for both of vLLM's model runners."""

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
