"""Which cores compute. vLLM keeps one of each rank for its own processes, and one more for a connector.

A connector usually moves KV, for which it needs a core. Ours moves none, so the second one computes, too. On machines
with so few cores that nothing would be left, vLLM keeps none at all, and that stays so.
"""

import os

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

logger = init_logger("vllm.kv_eviction")

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
KEPT = 1
"""Cores of each rank that vLLM keeps without a connector."""


def let_connectors_core_compute(local_ranks: int) -> None:
    """Ask vLLM to keep as many cores as without a connector, if it would keep more, and the user says nothing else.

    Changes this process's environment, from which vLLM's other processes get theirs.
    """
    if RESERVED in os.environ or envs.VLLM_CPU_OMP_THREADS_BIND != "auto":
        return
    cores = {cpu.physical_core for cpu in get_allowed_cpu_list()}
    if len(cores) <= 2 * KEPT * local_ranks:
        return
    os.environ[RESERVED] = str(KEPT * local_ranks)
    logger.info(
        "KV eviction: the core that vLLM would keep free for a connector computes, since this one moves no KV (%s=%s)",
        RESERVED,
        os.environ[RESERVED],
    )
