"""The model as Hugging Face defines it, run chunk by chunk as `take` prescribes, with a cache of plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Positions = dict[int, list[list[int]]]
"""By layer, for each KV head."""


@dataclass
class Rules:
    """The parameters of `take`; budget and warmup_budget in tokens per KV head."""

    chunk: int
    probe: int
    budget: int
    warmup_layers: int
    warmup_budget: int
    alpha: float
    kernel: int = 5
    probes: bool = True


@dataclass
class Cache:
    """Keys and values [Hkv, c, d] of a layer, where they come from, and the probe's averaged queries."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: list[list[int]]
    probe: torch.Tensor | None = None


@dataclass
class ChunkedModel:
    """Attributes: kept, by chunk what every layer stores after it."""

    model: Path
    rules: Rules
    kept: list[Positions] = field(default_factory=list)

    def logits(self, prompt: list[int], generated: list[int], observed: Sequence[Positions]) -> torch.Tensor:
        """Logits from which each generated token was chosen, [generated, vocabulary].

        Args:
            observed: by chunk what another implementation stores after it. Where the two differ by entries whose
                scores are as good as equal, this one goes on with the other's.
        """
        rules, n = self.rules, len(prompt)
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
                self._evict(layer, caches, query[:, -rules.probe :].double(), scaling, n, state, observed)
            return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)[None].contiguous(), weights

        ALL_ATTENTION_FUNCTIONS.register("chunked", attention)
        network = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="chunked"
        )

        def forward(tokens: list[int], positions: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                ids, places = torch.tensor([tokens]), torch.tensor([positions])
                return network(ids, position_ids=places, use_cache=False).logits[0]

        stops = [min(stop, n - rules.probe) for stop in range(rules.chunk, n, rules.chunk)] + [n]
        start = 0
        for chunk, stop in enumerate(stops):
            last = stop == n
            ids, positions = prompt[start:stop], list(range(start, stop))
            if not last and rules.probes:
                ids, positions = ids + prompt[n - rules.probe :], positions + list(range(n - rules.probe, n))
            state = {
                "probe": rules.probe * (not last and rules.probes),
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
        rules, cache = self.rules, caches[layer]
        if layer < rules.warmup_layers - 1:
            return
        if cache.probe is None or not rules.probes:
            cache.probe = queries
        else:
            cache.probe = rules.alpha * cache.probe + (1 - rules.alpha) * queries
        budget = rules.budget if state["last"] or layer >= rules.warmup_layers else rules.warmup_budget
        stored = cache.keys.shape[1]
        indices = [list(range(stored)) for _ in cache.keys]
        if stored > budget:
            protected = rules.probe if state["last"] else 0
            group = len(cache.probe) // len(cache.keys)
            for head, keys in enumerate(cache.keys.double()):
                rows = cache.probe[head * group : (head + 1) * group] @ keys[: stored - protected].T * scaling
                scores = rows.softmax(-1).mean((0, 1)).tolist()
                near = range(-(rules.kernel // 2), rules.kernel // 2 + 1)
                pooled = [
                    sum(scores[i + j] for j in near if 0 <= i + j < len(scores)) / rules.kernel
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
        for lower in range(layer + 1) if layer == rules.warmup_layers - 1 else (layer,):
            other = caches[lower]
            picks = torch.tensor(indices)
            pick = picks[:, :, None].expand(-1, -1, other.keys.shape[2])
            other.keys, other.values = other.keys.gather(1, pick), other.values.gather(1, pick)
            other.positions = [[p[i] for i in mine] for p, mine in zip(other.positions, indices, strict=True)]
