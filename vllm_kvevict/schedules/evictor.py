"""What the evictions of one rank share: its pages, where policies' inputs come from, who watches, and the news.

Owns the news for the scheduler until they are taken.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import LayerScores
from vllm_kvevict.schedules.inputs import Sources
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.reports import Claim, Report
from vllm_kvevict.schedules.ring import QueryRing


class Observer(Protocol):
    """Who wants to see each eviction of a rank."""

    def on_scores(self, admission: Admission, scores: LayerScores) -> None:
        """A layer was scored."""

    def on_compaction(
        self,
        admission: Admission,
        tokens: int,
        layer: int,
        kept: Sequence[Tensor],
        first: IntArray | None,
    ) -> None:
        """A layer of a request with so many tokens, or several from it on, is about to be compacted.

        Args:
            kept, first: as of :meth:`Selection.compact`.
        """

    def on_eviction(self, admission: Admission, tokens: int) -> None:
        """All layers of the rank are compacted."""


class Evictor:
    """One per rank.

    Args:
        cache: the rank's pages.
        first_layer: the rank's first layer in the model.
        num_model_layers: layers of the whole model.
        comm: the tensor-parallel group, None where it has one member.
        is_asynchronous: whether the device runs behind the host.
        sources: of policies' inputs.
        logits: scale and softcap of each of the rank's layers; a softcap of 0 is none.
        ring: of queries that choose after a step, None where none do.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        first_layer: int,
        num_model_layers: int,
        comm: TensorComm | None,
        sources: Sources,
        is_asynchronous: bool,
        logits: Sequence[tuple[float, float]] = (),
        ring: QueryRing | None = None,
    ):
        self.cache = cache
        self.first_layer = first_layer
        self.num_model_layers = num_model_layers
        self.comm = comm
        self.is_asynchronous = is_asynchronous
        self.sources = sources
        self.logits, self.ring = logits, ring
        self.observer: Observer | None = None
        self.reports: dict[str, list[Report]] = {}
        """In their order: a step may end the eviction of a prompt that stages decide together, and evict its answer."""
        self.claims: dict[str, Claim] = {}

    def is_last(self, layer: int) -> bool:
        """Whether a layer is the rank's last."""
        return layer == self.cache.num_layers - 1

    @property
    def has_all_layers(self) -> bool:
        """Whether all of the model's layers are on this rank."""
        return self.cache.num_layers == self.num_model_layers

    def take_news(self) -> tuple[dict[str, list[Report]], dict[str, Claim]]:
        """Reports and claims since the last call, by request id."""
        news = self.reports, self.claims
        self.reports, self.claims = {}, {}
        return news
