"""Exact decisions across tensor-parallel ranks, on torch.distributed alone."""

import torch
from torch import Tensor
from torch import distributed as dist


class TensorComm:
    """How the heads of a layer lie on the ranks of a tensor-parallel group.

    With num_kv_heads_total >= size each rank holds num_kv_heads_total/size consecutive KV heads.
    Otherwise each KV head is replicated on size/num_kv_heads_total consecutive ranks, which split the
    query heads of its group. Every method is a collective of the group unless it says otherwise.

    group: process group of the `size` ranks, None for the default one. rank: this process within it.
    Raises ValueError if heads and ranks do not divide.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, size: int, num_kv_heads_total: int
    ) -> None:
        if max(num_kv_heads_total, size) % min(num_kv_heads_total, size):
            raise ValueError(
                f"num_kv_heads_total={num_kv_heads_total} must divide size={size} or be a multiple"
            )
        self.group = group
        self.rank = rank
        self.size = size
        self.num_kv_heads_total = num_kv_heads_total
        self.replicas = max(1, size // num_kv_heads_total)

    @property
    def local_heads(self) -> slice:
        """Global indices of this rank's KV heads. No communication."""
        count = max(1, self.num_kv_heads_total // self.size)
        start = self.rank // self.replicas * count
        return slice(start, start + count)

    @property
    def is_first_replica(self) -> bool:
        """Whether no rank before this one has its KV heads too. No communication."""
        return self.rank % self.replicas == 0

    def gather_heads(self, local: Tensor) -> Tensor:
        """[local KV heads, ...] -> [all KV heads, ...] in global order; of replicas, the first one's."""
        return torch.cat(self._gather(local)[:: self.replicas])

    def gather_group_rows(self, rows: Tensor) -> Tensor:
        """[local query heads, ...] of this rank's KV head -> [all its query heads, ...], in head order.

        Communicates only where KV heads are replicated. Then all ranks take part, although only replicas
        exchange: subgroups would be one more thing to create in step on every rank.
        """
        if self.replicas == 1:
            return rows
        first = self.rank // self.replicas * self.replicas
        return torch.cat(self._gather(rows)[first : first + self.replicas])

    def sum_counts(self, local: Tensor) -> Tensor:
        """Elementwise sum of int64 counts over the ranks; of replicas, only the first one's count."""
        total = local.clone() if self.is_first_replica else torch.zeros_like(local)
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def _gather(self, local: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [local]
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return parts
