"""The model as Hugging Face defines it, run chunk by chunk as `take` prescribes, with a cache of plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_kvevict.policies import EvictionConfig, take

KERNEL = 5
"""Neighbours whose scores are averaged."""
Positions = dict[int, list[list[int]]]
"""By layer, for each KV head."""


@dataclass
class Cache:
    """Keys and values [Hkv, c, d] of a layer, where they come from, and the probe's averaged queries."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: list[list[int]]
    probe: torch.Tensor | None = None


class ChunkedModel:
    """Attributes: kept, by chunk what every layer stores after it."""

    def __init__(self, model: Path, config: EvictionConfig, n: int):
        layers = AutoConfig.from_pretrained(model).num_hidden_layers
        self.model, self.chunk, self.alpha = model, config.params["take_chunk"], config.params["take_alpha"]
        self.probe, self.budget = config.window_for(n), config.budget_for(n)
        self.warmup_layers = take.warmup_layers(config, layers)
        self.warmup_budget = take.chunk_budget(config, n, 0, layers, last=False)
        self.probes = config.params["take_guide"] == "prompt"
        self.kept: list[Positions] = []

    def logits(self, prompt: list[int], generated: list[int], observed: Sequence[Positions]) -> torch.Tensor:
        """Logits from which each generated token was chosen, [generated, vocabulary].

        Args:
            observed: by chunk what another implementation stores after it. Where the two differ by entries whose
                scores are as good as equal, this one goes on with the other's.
        """
        n = len(prompt)
        caches: dict[int, Cache] = {}
        state = {"probe": 0, "last": False, "chunk": 0}

        def attention(module, query, key, value, attention_mask, scaling, **_):
            layer, (query, key, value) = module.layer_idx, (query[0], key[0], value[0])
            if layer not in caches:
                caches[layer] = Cache(key[:, :0], value[:, :0], [[] for _ in key])
            cache = caches[layer]
            rows, before = query.shape[1], cache.keys.shape[1]
            keys, values = torch.cat([cache.keys, key], 1), torch.cat([cache.values, value], 1)
            visible = torch.ones(rows, before + rows, dtype=torch.bool).tril(before)
            group = len(query) // len(key)
            weights = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * scaling
            weights = weights.masked_fill(~visible, float("-inf")).softmax(-1)
            stored = rows - state["probe"]
            cache.keys, cache.values = keys[:, : before + stored], values[:, : before + stored]
            for head in cache.positions:
                head.extend(range(state["start"], state["start"] + stored))
            if state["evicts"]:
                self._evict(layer, caches, query[:, -self.probe :].double(), scaling, n, state, observed)
            return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)[None].contiguous(), weights

        ALL_ATTENTION_FUNCTIONS.register("chunked", attention)
        network = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="chunked"
        )

        def forward(tokens: list[int], positions: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                ids, places = torch.tensor([tokens]), torch.tensor([positions])
                return network(ids, position_ids=places, use_cache=False).logits[0]

        stops = [min(stop, n - self.probe) for stop in range(self.chunk, n, self.chunk)] + [n]
        start = 0
        for chunk, stop in enumerate(stops):
            last = stop == n
            ids, positions = prompt[start:stop], list(range(start, stop))
            if not last and self.probes:
                ids, positions = ids + prompt[n - self.probe :], positions + list(range(n - self.probe, n))
            state = {
                "probe": self.probe * (not last and self.probes),
                "last": last,
                "chunk": chunk,
                "start": start,
                "evicts": True,
            }
            out = forward(ids, positions)
            self.kept.append({layer: [list(h) for h in cache.positions] for layer, cache in caches.items()})
            start = stop
        state = {"probe": 0, "last": False, "chunk": len(stops), "start": n, "evicts": False}
        rest = forward(generated[:-1], list(range(n, n + len(generated) - 1))) if generated[1:] else out[:0]
        return torch.cat([out[-1:], rest])

    def _evict(self, layer, caches, queries, scaling, n, state, observed) -> None:
        """Average the probe's queries; choose, unless a higher layer does so for this one."""
        cache = caches[layer]
        if layer < self.warmup_layers - 1:
            return
        if cache.probe is None or not self.probes:
            cache.probe = queries
        else:
            cache.probe = self.alpha * cache.probe + (1 - self.alpha) * queries
        budget = self.budget if state["last"] or layer >= self.warmup_layers else self.warmup_budget
        stored = cache.keys.shape[1]
        indices = [list(range(stored)) for _ in cache.keys]
        if stored > budget:
            protected = self.probe if state["last"] else 0
            group = len(cache.probe) // len(cache.keys)
            for head, keys in enumerate(cache.keys.double()):
                rows = cache.probe[head * group : (head + 1) * group] @ keys[: stored - protected].T * scaling
                scores = rows.softmax(-1).mean((0, 1)).tolist()
                near = range(-(KERNEL // 2), KERNEL // 2 + 1)
                pooled = [
                    sum(scores[i + j] for j in near if 0 <= i + j < len(scores)) / KERNEL
                    for i in range(len(scores))
                ]
                best = sorted(range(len(pooled)), key=lambda i: (-pooled[i], i))[: budget - protected]
                mine = sorted(best) + list(range(stored - protected, stored))
                place = {position: i for i, position in enumerate(cache.positions[head])}
                theirs = sorted(place[position] for position in observed[state["chunk"]][layer][head])
                swapped = set(mine) ^ set(theirs)
                assert len(mine) == len(theirs), (layer, head, state, len(mine), len(theirs))
                if swapped:
                    assert max(swapped) < len(pooled), "the probe's tokens must stay"
                    close = [pooled[i] for i in swapped]
                    assert max(close) - min(close) <= 1e-5 * max(close), (layer, head, state, swapped)
                indices[head] = theirs
        for lower in range(layer + 1) if layer == self.warmup_layers - 1 else (layer,):
            other = caches[lower]
            picks = torch.tensor(indices)
            pick = picks[:, :, None].expand(-1, -1, other.keys.shape[2])
            other.keys, other.values = other.keys.gather(1, pick), other.values.gather(1, pick)
            other.positions = [[p[i] for i in mine] for p, mine in zip(other.positions, indices, strict=True)]
