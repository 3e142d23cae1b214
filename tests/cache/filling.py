"""Requests that store random entries, and what their rows then hold."""

import torch

from vllm_kvevict.cache import PagedKVCache


def append(cache, slot: int, tokens: int) -> None:
    """Let a request store further tokens, by one or many; a value is its key, negated."""
    for places in cache.entry_slots(cache.extend([slot], [tokens])):
        keys = torch.randn(places.numel(), cache.head_dim)
        cache.write(keys, -keys, places)


def entries(cache: PagedKVCache, slot: int) -> list[torch.Tensor]:
    """Keys and values of all rows, [2, entries, d] each."""
    found = []
    for row, count in enumerate(cache.lengths.of(slot).ravel().tolist()):
        layer, head = divmod(row, cache.num_kv_heads)
        found.append(torch.stack(cache.gather(slot, layer, torch.full((count,), head), torch.arange(count))))
    return found
