"""Requests that store random entries, and what their rows then hold."""

import torch

from vllm_kvevict.cache import PagedKVCache


def append(cache, slot: int, tokens: int) -> None:
    """Let a request store further tokens, by one or many; a value is its key, negated."""
    for places in cache.entry_slots(cache.extend([slot], [tokens])):
        count = places.numel()
        keys, scale = torch.randn(count, cache.head_dim), torch.randn(count, 1)
        more = {"scale": scale, "score": torch.randint(1 << 20, (count, 2), dtype=torch.int32)}
        cache.memory.write({"key": keys, "value": -keys} | more, places)


def entries(cache: PagedKVCache, slot: int) -> list[torch.Tensor]:
    """Of each row all fields of its entries side by side, [1, entries, numbers]."""
    found = []
    for row, count in enumerate(cache.lengths.of(slot).ravel().tolist()):
        layer, head = divmod(row, cache.num_kv_heads)
        fields = cache.gather(slot, layer, torch.full((count,), head), torch.arange(count))
        found.append(torch.cat(fields, 1)[None])
    return found
