"""A worker's end of the transport: what the rank can hold, and what became of each step."""

import torch

from vllm_kvevict import __version__
from vllm_kvevict.engine.messages import Handshake, WorkerMessages
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.schedules.base import RankCapacity


class WorkerEnd:
    """One per rank."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the KV memory, by layer name."""
        runtime = get_runtime()
        # Among the engine's own: of several engines, those of an MoE model form one group.
        self.rank: int = runtime.vllm_config.parallel_config.rank
        runtime.attach(kv_caches)

    def handshake(self) -> Handshake:
        """What the rank can do."""
        runtime = get_runtime()
        cache = runtime.rank.cache
        capacity = RankCapacity(
            runtime.rank.capacity,
            runtime.rank.evictor.first_layer,
            cache.num_layers,
            cache.num_kv_heads,
            runtime.rank.evictor.num_model_layers,
            cache.memory.layout.model_rows,
        )
        return Handshake(
            self.rank,
            capacity,
            __version__,
            runtime.rank.projections.available,
            runtime.rank.rotary.available,
            0 if runtime.ring is None else runtime.ring.num_parts,
        )

    def end_step(self) -> WorkerMessages | None:
        """The rank's news of a step; None before it has pages."""
        message = get_runtime().end_step(self.rank)
        return None if message is None else WorkerMessages({self.rank: message})
