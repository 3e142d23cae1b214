"""Writers with the page orders that attention kernels use, as plain torch scatters."""

from collections.abc import Callable
from functools import partial

import torch

from vllm_kvevict.cache import PagedKVCache

Place = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
"""Place of element (token, dim) in its half of the page, for (token, dim, page_size, head_dim)."""


def plain(t, d, page_size, head_dim):
    """[page_size, head_dim]"""
    return t * head_dim + d


def transposed(t, d, page_size, head_dim):
    """[head_dim, page_size]"""
    return d * page_size + t


def dim_pairs(t, d, page_size, head_dim):
    """[head_dim / 2, page_size, 2]"""
    return d // 2 * (2 * page_size) + 2 * t + d % 2


def grouped_dim_pairs(t, d, page_size, head_dim):
    """[page_size / 16, head_dim / 2, 16, 2]: the tiles of a matrix unit"""
    return t // 16 * (16 * head_dim) + d // 2 * 32 + t % 16 * 2 + d % 2


def token_pairs(t, d, page_size, head_dim):
    """[head_dim / 16, page_size / 2, 16, 2]"""
    return d // 16 * (16 * page_size) + t // 2 * 32 + d % 16 * 2 + t % 2


def scrambled(t, d, page_size, head_dim):
    """Each element once, but no order that strides could describe."""
    return (t * head_dim + d) * 37 % (page_size * head_dim)


def rotated(t, d, page_size, head_dim):
    """Rows rotated by their token, as if to avoid bank conflicts."""
    return t * head_dim + (d + t) % head_dim


def writer(page_size: int, key_place: Place = transposed, value_place: Place = plain):
    """A write function that stores keys and values in the given orders."""

    def write(storage, keys, values, slots):
        head_dim = storage.shape[1] // (2 * page_size)
        page, t, d = slots[:, None] // page_size, slots[:, None] % page_size, torch.arange(head_dim)
        storage[page, key_place(t, d, page_size, head_dim)] = keys
        storage[page, page_size * head_dim + value_place(t, d, page_size, head_dim)] = values

    return write


class WritableCache(PagedKVCache):
    """A cache whose entries tests store as attention would, by ``write(keys, values, entry_slots)``."""

    def __init__(self, storage, *, write, **sizes):
        super().__init__(storage, write=write, **sizes)
        self.write = partial(write, storage)


class Payload:
    """Keys and values that differ for every entry ever stored, exact in float32."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self._used = 0

    def ids(self, n: int) -> torch.Tensor:
        """``n`` numbers that were not used before, int64 [n]."""
        self._used += n
        assert self._used * self.head_dim <= 2**24
        return torch.arange(self._used - n + 1, self._used + 1)

    def keys(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, head_dim]; the fraction tells the elements apart. Exact for the first 2^24 / head_dim ids."""
        return ids[:, None].float() + torch.arange(self.head_dim) / self.head_dim

    def values(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, head_dim]"""
        return -self.keys(ids)


def vllm_cpu_writer(page_size: int, isa: str = "vec"):
    """vLLM's own CPU kernel."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def write(storage, keys, values, slots):
        pages, head_dim = storage.shape[0], storage.shape[1] // (2 * page_size)
        key_cache, value_cache = storage.view(pages, 1, 2 * page_size, head_dim).chunk(2, dim=2)
        torch.ops._C.cpu_attn_reshape_and_cache(
            keys[:, None], values[:, None], key_cache, value_cache, slots, isa, 1.0, 1.0, "auto"
        )

    return write
