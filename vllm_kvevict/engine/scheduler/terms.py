"""What reading a prompt takes, in pages of each rank. Owns nothing."""

from dataclasses import dataclass

Need = tuple[list[int], list[int]]
"""What a request takes of each rank: pages that it holds, and pages that are kept free for the rest of its prefill."""


@dataclass(frozen=True)
class Terms:
    """How a prompt is read and evicted.

    Attributes:
        peak: the most pages of each rank that the prefill holds itself.
        by_layer: whether its first step evicts it, layer by layer.
        copies: the most pages of each rank that copies of what it keeps take, from its eviction's step until that is
            reported, since its own pages stay with segments; the first tokens of its answer have room in them. None
            where it is evicted in place.
    """

    peak: list[int]
    by_layer: bool = False
    copies: list[int] | None = None
