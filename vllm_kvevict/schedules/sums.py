"""What a request's prompt adds up to while it is read or repeated, for policies that score by more than its last
queries."""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvevict.policies.tiles import TILE

SUMMED_AS_READ = ("col_sums", "tile_sums", "query_moments")
"""Fields of LayerInputs that sum up a prompt while it is read."""
REPEATED = "repeated"
"""The field that sums up what repeats of it say."""
SUMMED = (*SUMMED_AS_READ, REPEATED)


@dataclass(frozen=True)
class HeadDims:
    """Heads of a rank.

    Attributes:
        size: numbers of a query or a key.
        group: query heads of a KV head.
    """

    size: int
    group: int


def shapes(needs: Set[str], n: int, head_size: int) -> dict[str, tuple[int, ...]]:
    """What is held of a prompt of n tokens, by name the shape in fp32 for each layer and query head.

    "unfinished" are the queries of the tile in which a step ended, until the others of that tile have come.

    Args:
        needs: fields of LayerInputs that the policy reads.
    """
    every = {"col_sums": (n,), "tile_sums": (n,), "query_moments": (head_size + 1, head_size + 1)}
    found: dict[str, tuple[int, ...]] = {name: shape for name, shape in every.items() if name in needs}
    if found.keys() - {"col_sums"}:
        found["unfinished"] = (TILE, head_size)
    return found


def size(needs: Set[str], n: int, dims: HeadDims) -> int:
    """How many numbers are held for each layer and query head, those of a KV head by its query heads together."""
    numbers = sum(math.prod(shape) for shape in shapes(needs, n, dims.size).values())
    return numbers + (-(-n // dims.group) if REPEATED in needs else 0)


class PromptSums:
    """The sums of one request on one rank.

    Args:
        needs, n: as of :func:`shapes`.
        place: fp32, the request's part of the rank's reserve; as many numbers as are needed, or more.
        layers, heads, kv_heads, head_size: of the rank; its query heads and its KV heads.

    Attributes:
        fields: of LayerInputs, [layers, Hq, ...]; what repeats say is [layers, Hkv, n].
    """

    def __init__(
        self, needs: Set[str], n: int, place: Tensor, layers: int, heads: int, kv_heads: int, head_size: int
    ):
        self.n = n
        self.fields: dict[str, Tensor] = {}
        rest = place.flatten()
        for name, shape in shapes(needs, n, head_size).items():
            count = layers * heads * math.prod(shape)
            self.fields[name] = rest[:count].view(layers, heads, *shape).zero_()
            rest = rest[count:]
        if REPEATED in needs:
            self.fields[REPEATED] = rest[: layers * kv_heads * n].view(layers, kv_heads, n).zero_()
        self.unfinished = self.fields.pop("unfinished", None)

    def of(self, layer: int) -> dict[str, Tensor]:
        """The fields of a layer."""
        return {name: sums[layer] for name, sums in self.fields.items()}

    def finished_tiles(self, layer: int, query: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Tiles that a step finishes: the first token of each, and its queries [Hq, r, d].

        Args:
            query: [Hq, rows, d] of a step's tokens, from ``start`` on. Those of an unfinished tile are kept.
        """
        assert self.unfinished is not None
        stop = start + query.shape[1]
        for tile in range(start // TILE * TILE, stop, TILE):
            end = min(tile + TILE, self.n)
            rows = query[:, max(tile - start, 0) : end - start]
            if tile < start:
                rows = torch.cat((self.unfinished[layer, :, : start - tile], rows), 1)
            if end <= stop:
                yield tile, rows
            else:
                self.unfinished[layer, :, : rows.shape[1]] = rows
