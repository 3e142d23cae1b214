"""State of one worker process: its rank, the requests there, and what the running step needs.

It owns the requests that hold pages: a step closes who is gone, drops, answers, stores what was evicted, opens who was
admitted, and only then takes pages.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.engine import process
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.memory import head_dims
from vllm_kvevict.engine.messages import Holdings, RankMessage, StepMessage
from vllm_kvevict.engine.worker.attach import Rank, attach
from vllm_kvevict.engine.worker.batch import Batch, Decodes, lay_out, lay_out_by_layer
from vllm_kvevict.engine.worker.model_runners import batch_request_ids
from vllm_kvevict.engine.worker.reserve import allocate
from vllm_kvevict.schedules.eviction import Eviction, ExtraRows, QueryRows, ResidentRequest
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import eviction_of
from vllm_kvevict.schedules.reports import ExtraTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

logger = init_logger("vllm.kv_eviction")


@dataclass
class StepState:
    """What every layer of a step needs.

    Attributes:
        batch: the step's; None where vLLM only pretends to serve requests.
        evictions: of requests whose rows they have to see, with these.
    """

    batch: Batch | None
    evictions: Sequence[tuple[Eviction, QueryRows]] = ()


class Runtime:
    """One per worker process; see :func:`get_runtime`."""

    def __init__(self, worker: Any):
        self.vllm_config: VllmConfig = worker.vllm_config
        self.options = require_options(self.vllm_config)
        self.runner = worker.model_runner
        self.residents: dict[str, ResidentRequest] = {}
        self.extra: ExtraTokens | None = None
        self.freezes: dict[str, list[tuple[int, int]]] = {}
        self.most_pages: dict[int, int] | None = None
        self.reserve: Tensor | None = None
        self.kv_cache_config: Any = None
        """vLLM's layout of the KV memory, known before :meth:`attach`."""
        self._rank: Rank | None = None
        self.in_step = False
        self.step_state: StepState | None = None
        self.scheduled: dict[str, int] = {}
        device = this_device()
        assert device is not None
        self.device = device

    def take_reserve(self) -> None:
        """Take what requests of some policies hold beside their KV, before the KV cache takes what memory is left."""
        policies, model = self.options.reserved_for, self.vllm_config.model_config
        if policies:
            size = self.options.reserve_size(model.max_model_len, head_dims(self.vllm_config))
            self.reserve = allocate(self.vllm_config, size, self.runner.device)
            logger.info(
                "KV eviction: %.1f MiB are reserved for sums that %s needs while prompts are read",
                self.reserve.nbytes / 2**20,
                ", ".join(policies),
            )

    def attach(self, kv_caches: dict[str, Tensor]) -> None:
        """Take over vLLM's KV memory: its views by layer name. Raises as of :func:`attach`."""
        config, model = self.kv_cache_config, self.runner.model
        self._rank = attach(
            self.vllm_config, self.options, self.device, model, config, kv_caches, self.reserve
        )

    @property
    def is_attached(self) -> bool:
        """Whether the KV memory is there."""
        return self._rank is not None

    @property
    def rank(self) -> Rank:
        """What this worker has of the model's KV."""
        assert self._rank is not None, "the KV memory is not there yet"
        return self._rank

    # A step, from the scheduler's message to the report.

    @torch.inference_mode()  # as vLLM's runner, which made the tables' tensors
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Free what finished, was preempted or is dropped, and open what was admitted; before any page is taken.

        Each in its turn: what is dropped may have had borrowers that just finished, and a prefix must be stored before
        the request that it is of goes on.
        """
        # vLLM warms up with steps that no scheduler made, of requests that have no plan.
        self.in_step = scheduler_output.kv_connector_metadata is not None
        self.step_state = None
        message = scheduler_output.kv_connector_metadata if self.in_step else StepMessage()
        assert isinstance(message, StepMessage)
        self.extra, self.freezes, self.most_pages = message.extra, message.freezes, message.most_pages
        self.scheduled = scheduler_output.num_scheduled_tokens
        self._freeze(scheduler_output.finished_req_ids)
        gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        self._close([*gone, *(admission.request_id for admission in message.admissions)])
        self._take_back_drafts(scheduler_output.scheduled_cached_reqs)
        self.rank.prefixes.drop(message.drops)
        self._exchange_blocks(message)
        self.rank.cache.pool.fewest_free = self.rank.cache.num_free
        for name, answer in message.answers.items():
            resident = self.residents.get(name)
            if resident is not None and resident.eviction is not None:
                resident.eviction.answer(answer)
        self._store_prefixes()
        for admission in message.admissions:
            self.residents[admission.request_id] = self._open(admission)
        self.rank.prefixes.expect(message.stores)

    def _take_back_drafts(self, scheduled: "CachedRequestData") -> None:
        """Drop what was stored of draft tokens that were rejected: such requests have fewer computed tokens."""
        slots, dropped = [], []
        for name, computed in zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True):
            resident = self.residents.get(name)
            if resident is not None and resident.tokens > computed:
                slots.append(resident.request_slot)
                dropped.append(resident.tokens - computed)
                resident.tokens = computed
        if slots:
            self.rank.cache.truncate(slots, dropped)

    def _exchange_blocks(self, message: StepMessage) -> None:
        """Use blocks that became pages, and give up those that other layers need, after moving what they hold."""
        if self.rank.block_pages is None:
            return
        if message.new_blocks:
            self.rank.cache.add_pages(
                self.rank.block_pages.in_blocks(message.new_blocks, self.rank.cache.device)
            )
        if message.lost_blocks:
            self.rank.cache.remove_pages(
                self.rank.block_pages.in_blocks(message.lost_blocks, self.rank.cache.device)
            )

    def _close(self, request_ids: Sequence[str]) -> None:
        names = [name for name in dict.fromkeys(request_ids) if name in self.residents]
        closed = [self.residents.pop(name) for name in names]
        for resident in closed:
            self.rank.prefixes.forget(resident.admission.request_id)
        if closed:
            self.rank.cache.close([resident.request_slot for resident in closed])

    def _open(self, admission: Admission) -> ResidentRequest:
        return ResidentRequest(admission, self.rank.prefixes.open(admission), admission.tokens)

    def _freeze(self, request_ids: Iterable[str]) -> None:
        """Make shared entries of requests' pages where the scheduler asks for that."""
        for name in request_ids:
            if name in self.freezes and name in self.residents:
                self.rank.prefixes.freeze(self.residents[name].request_slot, self.freezes.pop(name))

    def _store_prefixes(self) -> None:
        """Cache those prefixes that were evicted since the last message to the scheduler."""
        for name, report in self.rank.evictor.reports.items():
            if report.part is not None and name in self.residents:
                self.rank.prefixes.store(name, self.residents[name].request_slot)

    def reads_prompts(self) -> bool:
        """Whether the running step has tokens of a prompt that is to be evicted, repeats one, or evicts an answer."""
        if not self.in_step:
            return False
        return self.extra is not None or any(map(self._reads_prompt, self.scheduled))

    def _reads_prompt(self, name: str) -> bool:
        resident = self.residents.get(name)
        phase = None if resident is None else resident.plan.phase_at(resident.tokens)
        if resident is None or phase is None:
            return False
        return not phase.begins or resident.tokens + self.scheduled[name] >= phase.next_eviction(
            resident.tokens
        )

    def build(self, common: Any) -> StepState:
        """Take the step's pages and lay out its batch, once for all groups of layers.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        # Batch rows of dummy runs have indices that belong to no request, or to another one.
        if not self.in_step:
            return self.build_dummy(common)
        if self.step_state is None:
            self.step_state = self._build_step(common)
        return self.step_state

    def _build_step(self, common: Any) -> StepState:
        spans, extra = self._token_rows(common)
        by_layer = {name: span for name, span in spans.items() if self.residents[name].starts_by_layer}
        at_once = {name: [span] for name, span in spans.items() if name not in by_layer}
        if extra is not None:
            # To the cache and to attention they are more tokens of their request; the eviction drops them again.
            at_once.setdefault(extra.tokens.request_id, []).append(extra.rows)
        num_tokens = max(
            (span.stop for span in (*spans.values(), *([extra.rows] if extra else []))), default=0
        )
        as_they_are = extra is None and not by_layer
        batch = self._take_pages(at_once, num_tokens, None if as_they_are else _order(at_once, num_tokens))
        for name, span in by_layer.items():
            batch.by_layer.append(lay_out_by_layer(self.rank.cache, self.residents[name].request_slot, span))
        return StepState(self._replayable(batch, common.num_reqs), list(self._advance(spans, extra)))

    def _advance(
        self, spans: dict[str, slice], extra: ExtraRows | None
    ) -> Iterator[tuple[Eviction, QueryRows]]:
        """Count requests' rows as stored, and say what they mean for their evictions."""
        extra_of = None if extra is None else extra.tokens.request_id
        for name, span in spans.items():
            resident = self.residents[name]
            eviction = eviction_of(self.rank.evictor, resident)
            rows = None if eviction is None else eviction.rows(span, extra if extra_of == name else None)
            resident.tokens += span.stop - span.start
            if eviction is not None and rows is not None:
                yield eviction, rows
        if extra is not None and extra_of not in spans:
            eviction = self._eviction(extra.tokens)
            yield eviction, eviction.repeat_rows(extra)

    def _eviction(self, extra: ExtraTokens) -> Eviction:
        """The eviction that extra tokens are computed for."""
        eviction = eviction_of(self.rank.evictor, self.residents[extra.request_id])
        assert eviction is not None
        return eviction

    def _token_rows(self, common: Any) -> tuple[dict[str, slice], ExtraRows | None]:
        """Each request's query tokens in the step, by its id, and the extra ones."""
        names = batch_request_ids(self.runner, common)
        starts = common.query_start_loc_cpu[: len(names) + 1].tolist()
        spans = {name: slice(*ends) for name, ends in zip(names, itertools.pairwise(starts), strict=True)}
        extra = None if self.extra is None else ExtraRows(self.extra, spans.pop(self.extra.name))
        return spans, extra

    def _take_pages(
        self, token_rows: dict[str, list[slice]], num_tokens: int, order: IntArray | None
    ) -> Batch:
        """Let requests grow by their tokens in the step, in all layers, and lay out how they attend.

        Args:
            token_rows: of the requests that grow.
            num_tokens: of the step.
            order: as of :func:`lay_out`.
        """
        if not token_rows:
            return Batch(num_tokens, None, [], None)
        lengths = [sum(span.stop - span.start for span in parts) for parts in token_rows.values()]
        slots = {name: self.residents[name].request_slot for name in token_rows}
        if self.extra is not None:
            slots[self.extra.request_id] = self._eviction(self.extra).begin_extra(self.extra)
        cache, ours = self.rank.cache, self.rank.decode_attention
        step = cache.extend(list(slots.values()), lengths)
        self._freeze(token_rows)
        return lay_out(cache, step, 0 if ours is None else ours.most_new_tokens, num_tokens, order)

    def build_dummy(self, common: Any) -> StepState:
        """A step that touches no page; decodes alone are made of padding, so that a CUDA graph can capture them."""
        batch, rank = None, self._rank
        if rank and rank.pages.uses_triton and rank.decode_attention and common.max_query_len == 1:
            none = Decodes(rank.decode_slots[:0], None)
            batch = self._replayable(Batch(common.num_actual_tokens, None, [], none), common.num_reqs)
        return StepState(batch)

    def _replayable(self, batch: Batch, num_requests: int) -> Batch:
        """The batch with what CUDA graphs read at its fixed place, padded to ``num_requests``."""
        if not self.rank.pages.uses_triton or self.rank.decode_attention is None or batch.decodes is None:
            return batch
        self.rank.decode_attention.set_arena(self.rank.cache.tables.arena)
        if batch.decodes.tokens is not None:
            return batch
        count = batch.decodes.request_slots.numel()
        self.rank.decode_slots[:count] = batch.decodes.request_slots
        self.rank.decode_slots[count:num_requests] = -1
        return replace(batch, decodes=Decodes(self.rank.decode_slots[:num_requests], None))

    def after_attention(
        self, layer: int, state: StepState, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Evict, or prepare to; arguments as of :class:`LayerStep`."""
        step = LayerStep(layer, query, scale, softcap)
        for eviction, rows in state.evictions:
            eviction.after_attention(step, rows)

    def leave_step(self) -> None:
        """The step's kernels are on their way; what vLLM runs from now on serves no request."""
        self.in_step = False
        self.step_state = None

    @torch.inference_mode()
    def end_step(self, number: int) -> RankMessage | None:
        """What this rank, by its global number, tells the scheduler after a step."""
        if not self.is_attached:
            return None
        self._store_prefixes()
        reports, claims = self.rank.evictor.take_news()
        holdings = None
        if self.options.check:
            self.rank.prefixes.verify()
            peak = self.rank.cache.pool.num_pages - self.rank.cache.pool.fewest_free
            if self.most_pages is not None and peak > self.most_pages[number]:
                raise RuntimeError(
                    f"kv eviction check: rank {number} held {peak} pages during a step, the ledger allowed "
                    f"{self.most_pages[number]}"
                )
            holdings = Holdings(
                {name: self._holding(resident) for name, resident in self.residents.items()},
                self.rank.prefixes.holdings(),
            )
        shared = self.rank.cache.loans.pages
        pages, entries = self.rank.cache.physical_pages, self.rank.cache.lengths.total_entries
        return RankMessage(reports, claims, pages, shared[True], shared[False], entries, holdings)

    def _holding(self, resident: ResidentRequest) -> tuple[int, int, int]:
        """A request's epoch, tokens and pages, borrowed ones among them."""
        pages = self.rank.cache.held(resident.request_slot) + self.rank.cache.borrowed(resident.request_slot)
        return resident.admission.epoch, resident.tokens, pages


def _order(token_rows: dict[str, list[slice]], num_tokens: int) -> IntArray | None:
    """Where in the batch the tokens of requests are, one after the other; None if that is all of it, in this order."""
    parts = list(itertools.chain.from_iterable(token_rows.values()))
    ends = [0, *(part.stop for part in parts)]
    if ends[-1] == num_tokens and all(part.start == end for part, end in zip(parts, ends, strict=False)):
        return None
    return np.concatenate([np.arange(part.start, part.stop) for part in parts] or [np.arange(0)])


_runtime: Runtime | None = None


def start_runtime(worker: Any) -> Runtime:
    """Make this worker process's runtime."""
    global _runtime
    _runtime = Runtime(worker)
    process.begin(worker)
    return _runtime


def stop_runtime(worker: Any) -> None:
    """Let go of the pool when its worker ends; its process may live on."""
    global _runtime
    if process.end(worker):
        _runtime = None


def get_runtime() -> Runtime:
    """The runtime of this worker process; vLLM builds attention layers and connectors without passing it."""
    assert _runtime is not None, "the KV eviction worker has not started"
    return _runtime
