"""Which cores compute. vLLM keeps one of each rank for its own processes, and one more for a connector.

A connector usually moves KV, for which it needs a core. Ours moves none, so it gets none. Where both together would
leave none to compute, vLLM keeps neither: then its own processes, and whatever else runs, hold up threads that wait for
each other.
"""

import os

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

logger = init_logger("vllm.kv_eviction")

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
KEPT = 1
"""Cores of each rank that vLLM keeps without a connector."""


def compute_on_as_many_as_stock(local_ranks: int) -> None:
    """Ask vLLM to keep as many cores as without a connector, if it can keep any and the user says nothing else.

    Changes this process's environment, from which vLLM's other processes get theirs.
    """
    if RESERVED in os.environ or envs.VLLM_CPU_OMP_THREADS_BIND != "auto":
        return
    cores = {cpu.physical_core for cpu in get_allowed_cpu_list()}
    if len(cores) <= KEPT * local_ranks:
        return
    os.environ[RESERVED] = str(KEPT * local_ranks)
    logger.info(
        "KV eviction: vLLM keeps as many cores free as without a connector, since this one moves no KV (%s=%s)",
        RESERVED,
        os.environ[RESERVED],
    )
