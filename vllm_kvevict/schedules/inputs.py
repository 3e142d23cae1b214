"""How a rank collects the inputs of policies, and what they take of its reserve until a request is evicted.

Owns what one request has collected so far (:class:`Collected`), which ends with its eviction. What is reserved follows
from the inputs and the length, in every process alike, and nothing is written behind a request's place. Sums do not
depend, in a single bit, on the steps in which a prompt is read.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.policies import EvictionConfig, LayerInputs, Rotary, inputs
from vllm_kvevict.policies.attention import add_column_sums
from vllm_kvevict.policies.inputs import Input
from vllm_kvevict.policies.sinks import num_sinks
from vllm_kvevict.policies.tiles import TILE, add_query_moments, add_tile_sums

WindowAttention = Callable[[Tensor, Tensor, int, float, float, str], Tensor]
"""Of (window's queries [w, Hq, d], page table int32 [Hkv, pages], n, scale, softcap, how the queries are combined):
fp32 [Hq, n - w]."""


@dataclass
class Sources:
    """What a rank reads inputs from.

    Attributes:
        cache: its pages.
        output_projection: gives w_o of a local layer, [Hq, d, hidden].
        rotary: gives how the model turns queries and keys by their positions.
        window_attention: computes what tokens receive of the window's attention from pages, where the device has a
            kernel for it.
        kernel_windows: numbers of a window's rows that `window_attention` is compiled for; None: it is for any. Others
            are scored from queries and keys, since compiling would hold up all requests.
        reserve: fp32 [size, local evicted layers * Hq], for :attr:`Collected.sums`; None where no policy needs it.
    """

    cache: PagedKVCache
    output_projection: Callable[[int], Tensor]
    rotary: Callable[[], Rotary]
    window_attention: WindowAttention | None = None
    kernel_windows: Collection[int] | None = None
    reserve: Tensor | None = None


class FreshEntries(NamedTuple):
    """Fields of a request's tokens in one of the rank's layers, [tokens, Hkv, numbers] each, as they are to be stored.
    Keys are after RoPE."""

    layer: int
    fields: Mapping[str, Tensor]


@dataclass(frozen=True)
class LayerStep:
    """What a layer's attention computed in a step.

    Attributes:
        layer: index among the rank's layers.
        query: [tokens, Hq, d] of the step, after RoPE.
        scale, softcap: of its logits; a softcap of 0 is none.
        not_stored: by request slot, what the layer has of requests of which it stores only what their eviction keeps.
    """

    layer: int
    query: Tensor
    scale: float
    softcap: float
    not_stored: Mapping[int, FreshEntries] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of a request in one layer of a step.

    Attributes:
        config, request_slot: of the request; step: of the layer.
        n: tokens of the phase in which it is evicted; all else counts from the first of them.
        reserved_at: where in the reserve its place begins.
        first: which of the phase's tokens is the first of them.
        query: [Hq, tokens, d], after RoPE.
        begins: position of the phase's first token.
        pinned: int64 [Hkv], entries that stay before the phase's; None for none.
    """

    config: EvictionConfig
    n: int
    request_slot: int
    reserved_at: int | None
    step: LayerStep
    first: int
    query: Tensor
    begins: int = 0
    pinned: IntArray | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return self.query.shape[1]

    def keys(self, sources: Sources, first: int = 0) -> Tensor:
        """[Hkv, tokens, d]: from one of the phase's tokens on to the last of these."""
        return self.keys_between(sources, first, self.first + self.count)

    def keys_between(self, sources: Sources, first: int, stop: int) -> Tensor:
        """[Hkv, stop - first, d] of the phase's tokens."""
        return self._field("key", sources, first, stop)

    def values(self, sources: Sources) -> Tensor:
        """[Hkv, n, d_v]."""
        return self._field("value", sources, 0, self.n)

    def _field(self, name: str, sources: Sources, first: int, stop: int) -> Tensor:
        """A field of the phase's tokens, [Hkv, stop - first, numbers]."""
        cache, slot, layer = sources.cache, self.request_slot, self.step.layer
        if slot in self.step.not_stored:
            stored = {x: numbers[first:stop] for x, numbers in self.step.not_stored[slot].fields.items()}
            return cache.memory.decode(name, stored).transpose(0, 1).contiguous()
        if self.pinned is None:
            return cache.read(name, slot, layer, stop, first)
        counts = np.full_like(self.pinned, stop - first)
        return cache.read_behind(name, slot, layer, self.pinned + first, counts)

    def pinned_keys(self, sources: Sources) -> list[Tensor] | None:
        """Of each KV head the keys that stay before the phase's, [S, d]; None for none."""
        if self.pinned is None:
            return None
        start = np.zeros_like(self.pinned)
        keys = sources.cache.read_behind("key", self.request_slot, self.step.layer, start, self.pinned)
        return [own[:count] for own, count in zip(keys, self.pinned.tolist(), strict=True)]

    def seen_keys(self, sources: Sources) -> Iterable[Tensor]:
        """Of each KV head the keys that the last of these tokens sees, [S + tokens, d]."""
        own, pinned = self.keys(sources), self.pinned_keys(sources)
        return own if pinned is None else map(torch.cat, zip(pinned, own, strict=True))


def _add_columns(sources: Sources, tokens: LayerTokens, out: Tensor) -> None:
    keys, stop = tokens.seen_keys(sources), tokens.first + tokens.count
    add_column_sums(out, tokens.query, keys, stop, tokens.step.scale, tokens.step.softcap)


def _add_tile(sources: Sources, tile: LayerTokens, out: Tensor) -> None:
    add_tile_sums(out[:, tile.first : tile.first + tile.count], tile.query, tile.keys(sources, tile.first))


def _add_moments(sources: Sources, tile: LayerTokens, out: Tensor) -> None:
    first = max(tile.first, num_sinks(tile.config, tile.n))
    before = sources.rotary().undo(tile.query[:, first - tile.first :].float(), tile.begins + first)
    add_query_moments(out, before)


READ: dict[Input, Callable[[Sources, LayerTokens], Any]] = {
    inputs.VALUES: lambda sources, x: x.values(sources),
    inputs.W_O: lambda sources, x: sources.output_projection(x.step.layer),
    inputs.ROTARY: lambda sources, x: sources.rotary(),
}
"""Inputs that are read where they are."""
Add = Callable[[Sources, LayerTokens, Tensor], None]
BY_STEP: dict[Input, Add] = {inputs.COL_SUMS: _add_columns}
"""Inputs that sum up a prompt which several steps read, with who adds a step's tokens to those of a layer."""
BY_TILE: dict[Input, Add] = {inputs.TILE_SUMS: _add_tile, inputs.QUERY_MOMENTS: _add_moments}
"""Likewise, with who adds a tile's."""
UNFINISHED = Input("unfinished", "Hq tile d", "the queries of a tile that no step has completed yet")


def sums_up(needs: Collection[Input]) -> bool:
    """Whether any of them sums up a prompt while it is read, unless one step reads it all."""
    return any(what in BY_STEP or what in BY_TILE for what in needs)


class HeadDims(NamedTuple):
    """Heads of a rank: how many numbers a query or a key has, and how many query heads a KV head."""

    size: int
    group: int


def shapes(needs: Collection[Input], n: int, head_size: int) -> dict[Input, tuple[int, ...]]:
    """What is held of a prompt of n tokens in the reserve, with its shape in fp32 for each layer and head."""
    held = [what for what in (*BY_STEP, *BY_TILE, inputs.REPEATED) if what in needs]
    if not BY_TILE.keys().isdisjoint(held):
        held.append(UNFINISHED)
    sizes = {"n": n, "d": head_size, "d+1": head_size + 1, "tile": TILE}
    return {what: tuple(sizes[dim] for dim in what.dims.split()[1:]) for what in held}


def size(needs: Collection[Input], n: int, dims: HeadDims, in_one_step: bool = False) -> int:
    """How many numbers that is for each layer and query head; the query heads of a KV head share its own.

    Args:
        in_one_step: whether one step reads all of the prompt: it scores by the queries themselves.
    """
    if in_one_step and inputs.REPEATED not in needs:
        return 0
    held = shapes(needs, n, dims.size).items()
    return sum(-(-math.prod(shape) // (dims.group if what.by_kv_head else 1)) for what, shape in held)


def lay_out(
    needs: Collection[Input], n: int, place: Tensor, layers: int, heads: int, kv_heads: int, head_size: int
) -> dict[Input, Tensor]:
    """What is held of a prompt, zero and [layers, Hq or Hkv, ...], one after the other from the start of a place.

    Args:
        place: fp32, the request's part of the rank's reserve; as many numbers as are needed, or more.
        layers, heads, kv_heads, head_size: of the rank; its query heads and its KV heads.
    """
    found, rest = {}, place.flatten()
    for what, shape in shapes(needs, n, head_size).items():
        full = layers, kv_heads if what.by_kv_head else heads, *shape
        found[what] = rest[: math.prod(full)].view(full).zero_()
        rest = rest[math.prod(full) :]
    return found


def add_up(sources: Sources, tokens: LayerTokens, sums: dict[Input, Tensor]) -> None:
    """Add a step's tokens to the sums of their layer."""
    parts = [(BY_STEP, tokens)]
    if UNFINISHED in sums:
        parts += [(BY_TILE, tile) for tile in _finished_tiles(tokens, sums[UNFINISHED])]
    for added, part in parts:
        for what, add in added.items():
            if what in sums:
                add(sources, part, sums[what])


def _finished_tiles(tokens: LayerTokens, unfinished: Tensor) -> Iterator[LayerTokens]:
    """The tiles that a step's tokens finish. Queries of one that they do not are kept in `unfinished`."""
    start, query, stop = tokens.first, tokens.query, tokens.first + tokens.count
    for tile in range(start // TILE * TILE, stop, TILE):
        end = min(tile + TILE, tokens.n)
        rows = query[:, max(tile - start, 0) : end - start]
        if tile < start:
            rows = torch.cat((unfinished[:, : start - tile], rows), 1)
        if end <= stop:
            yield replace(tokens, first=tile, query=rows)
        else:
            unfinished[:, : rows.shape[1]] = rows


@dataclass
class Collected:
    """What a request has collected until its eviction.

    Attributes:
        window: last queries before the eviction position, [local layers, window, Hq, d], as far as computed, if no
            step has all of them, or a later one chooses by them.
        sums: what its prompt adds up to so far, see :func:`lay_out`; empty if one step reads it all.
    """

    window: Tensor | None = None
    sums: dict[Input, Tensor] = field(default_factory=dict)

    def add(
        self, sources: Sources, tokens: LayerTokens, target: slice, window: int, evicts: bool
    ) -> Tensor | None:
        """Keep what later steps or layers will need; the window's queries so far, [rows, Hq, d], if they matter.

        Args:
            target: where in the window the last of the tokens belong.
            window: how many tokens it has.
            evicts: whether they choose in this step.
        """
        needs, count = tokens.config.inputs, target.stop - target.start
        if tokens.count != tokens.n and sums_up(needs):
            add_up(sources, tokens, self.sums_of(sources, tokens))
        if inputs.Q_WINDOW not in needs or count <= 0:
            return None
        query = tokens.query[:, tokens.count - count :].transpose(0, 1).contiguous()
        if count == window and evicts:
            return query
        if self.window is None:
            shape = (sources.cache.num_layers, tokens.config.window_for(tokens.n), *query.shape[1:])
            self.window = query.new_empty(shape)
        self.window[tokens.step.layer, target] = query
        return self.window[tokens.step.layer, :window]

    def sums_of(self, sources: Sources, tokens: LayerTokens) -> dict[Input, Tensor]:
        """What the prompt adds up to so far in the layer of any of its tokens."""
        if not self.sums:
            assert sources.reserve is not None
            place, cache = sources.reserve[tokens.reserved_at :], sources.cache
            dims = cache.num_layers, len(tokens.query), cache.num_kv_heads, cache.head_dim
            self.sums = lay_out(tokens.config.inputs, tokens.n, place, *dims)
        return {what: sums[tokens.step.layer] for what, sums in self.sums.items()}

    def of_layer(self, sources: Sources, tokens: LayerTokens, window: Tensor | None) -> LayerInputs:
        """What the policy reads of a layer in which all is stored that it scores.

        Args:
            tokens: of the step.
            window: queries of the window, [w, Hq, d], where the policy reads them.
        """
        needs, step, cache = tokens.config.inputs, tokens.step, sources.cache
        found = {what: read(sources, tokens) for what, read in READ.items() if what in needs}
        found[inputs.Q_WINDOW] = None if window is None else window.transpose(0, 1)
        # Where a step has the queries of all tokens, nothing was summed up.
        found[inputs.Q_ALL] = tokens.query if tokens.count == tokens.n else None
        if self.sums:
            found |= self.sums_of(sources, tokens)
        received = _received(sources, tokens, window)
        if received or (inputs.REPEATED in needs and inputs.Q_WINDOW not in needs):
            keys = torch.empty(cache.num_kv_heads, tokens.n, cache.head_dim, device="meta")
        else:
            keys = tokens.keys_between(sources, 0, tokens.n)
        fields = {what.name: given for what, given in (found | received).items() if what is not UNFINISHED}
        return LayerInputs(
            keys=keys,
            scale=step.scale,
            logit_softcap=step.softcap or None,
            earlier_keys=tokens.pinned_keys(sources) if not keys.is_meta else None,
            begins=tokens.begins,
            **fields,
        )


def _received(sources: Sources, tokens: LayerTokens, window: Tensor | None) -> dict[Input, Tensor]:
    """What tokens receive of the window's attention, where a kernel computes it."""
    attend, how, step = sources.window_attention, tokens.config.combines_rows_by, tokens.step
    if attend is None or how is None or tokens.pinned is not None:
        return {}
    assert window is not None
    if sources.kernel_windows is not None and len(window) not in sources.kernel_windows:
        return {}
    table = sources.cache.table(tokens.request_slot, step.layer)
    return {inputs.RECEIVED[how]: attend(window, table, tokens.n, step.scale, step.softcap, how)}
