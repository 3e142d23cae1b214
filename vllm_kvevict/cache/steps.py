"""What the cache tells the engine about a step and about an eviction. Owns nothing."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from vllm_kvevict.cache.lengths import IntArray


def to_device(array: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """A host array on a device, where a CPU shares its memory; nobody waits for the copy."""
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True)
class Extension:
    """One step's new tokens, for which there is room. B requests.

    Attributes:
        request_slots: int64 [B], the requests in the order of the batch.
        tokens: int64 [B], new tokens of each, on the host.
        max_lens: the largest kv_len of each request after them, on the host.
    """

    request_slots: torch.Tensor
    tokens: IntArray
    max_lens: list[int]


class Settled(NamedTuple):
    """What a request holds after its layers were compacted.

    Attributes:
        pages: pages held.
        residues: int64 [page_size], number of rows at each kv_len modulo page_size.
        kept: int64 [L, H], kv_len of each row.
    """

    pages: int
    residues: IntArray
    kept: IntArray
