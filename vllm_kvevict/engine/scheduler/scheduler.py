"""vLLM's schedulers with the page ledger in the block manager's place.

Owns the step that is being scheduled: no chunk in it crosses an eviction position, and one request has extra tokens.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.memory import bounds_of, head_dims
from vllm_kvevict.engine.messages import StepMessage
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.engine.scheduler.admission import AdmissionControl
from vllm_kvevict.engine.scheduler.keys import next_key, prefix_keys
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.scheduler.scratch import ScratchBlocks
from vllm_kvevict.engine.scheduler.shared.uncompressed import whole_until
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts
from vllm_kvevict.schedules.reports import ExtraTokens

logger = init_logger("vllm.kv_eviction")

MOST_POSTPONED = 8
"""Steps that a prompt waits for one that has room for all of it, before others pause for that."""


@dataclass
class StepBudget:
    """The step that is being scheduled, as far as that has come.

    Attributes:
        taken: tokens of the requests that run.
        tokens_left: those that nobody takes.
        room_for_drafts: pages of each rank that drafts may still take.
        pausing_for: the prompt that everybody else pauses for.
        queue_waits: whether a prompt was put off; nobody overtakes it.
    """

    taken: dict[str, int]
    tokens_left: int
    room_for_drafts: list[int]
    pausing_for: str | None
    queue_waits: bool = False

    def spend(self, name: str, tokens: int) -> None:
        """It computes so many tokens of a request."""
        self.tokens_left -= tokens - self.taken.get(name, 0)
        self.taken[name] = tokens

    def put_off(self) -> None:
        """It computes nothing of a prompt that might have begun."""
        self.queue_waits = True

    def spend_on_drafts(self, pages: Sequence[int]) -> bool:
        """Take pages of each rank for drafts, if there are so many."""
        left = [free - more for free, more in zip(self.room_for_drafts, pages, strict=True)]
        if min(left) < 0:
            return False
        self.room_for_drafts = left
        return True


class EvictionScheduler(Scheduler):
    """Swaps the manager, ends prefill chunks where evictions are due, and sends probes along with them."""

    kv_cache_manager: PageLedger
    requests: dict[str, Request]
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._step = StepBudget({}, 0, [], None)
        self._postponed: dict[str, int] = {}
        """How often a prompt that no step had room for was put off."""
        self._ended: list[Request] = []
        vllm_config = self.vllm_config
        options = require_options(vllm_config)
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        layers = LayerMap.found(self.kv_cache_config.kv_cache_groups)
        self.kv_cache_manager = PageLedger(
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            enable_caching=vllm_config.cache_config.enable_prefix_caching,
            log_stats=self.log_stats,
            use_eagle=self.use_eagle_block_drop,
            num_prefill_lookahead=self.num_prefill_lookahead,
            options=options,
            head_dims=head_dims(vllm_config),
            # A waiting request with one token left would be padded with placeholders for drafts, as rows that must not
            # follow an eviction.
            fewest_read=2 if self.num_spec_tokens else 1,
            most_adapters=vllm_config.lora_config.max_loras if vllm_config.lora_config else 0,
            blocks_kept=layers.blocks_kept(vllm_config),
            prefix_keys=partial(prefix_keys, block_size=self.hash_block_size, hash_function=hash_function),
            next_key=partial(next_key, hash_function=hash_function),
            control=AdmissionControl(
                bounds_of(vllm_config),
                self.max_num_scheduled_tokens,
                options.decode_reserve,
                self.max_model_len,
            ),
            waiting_requests=self._waiting_requests,
            tokens_left=lambda: self._step.tokens_left,
        )
        # The ledger counts these among what is taken for good, once it learns of the ranks.
        self._scratch = ScratchBlocks(
            self.kv_cache_manager, layers.scratch(vllm_config), self.num_lookahead_tokens
        )
        self.connector.bind_kv_cache_manager(self.kv_cache_manager)

    def add_request(self, request: Request) -> None:
        if self.policy is not SchedulingPolicy.PRIORITY:
            request.priority = 0  # vLLM does not look at it then, so who is admitted must not depend on it
        super().add_request(request)

    @property
    def _free_seats(self) -> int:
        """Requests that may run besides, as of ``--max-num-seqs``."""
        return max(0, self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input)

    def _waiting_requests(self) -> Iterable[Request]:
        """Requests that are not admitted and that there are seats for, in their order."""
        return itertools.islice(self.waiting, self._free_seats)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        is_paused = self.pause_state == PauseState.PAUSED_ALL
        ledger = self.kv_cache_manager
        ledger.extra_tokens.begin_step(may_repeat=not is_paused)
        ledger.gate.begin_step()
        self._step = StepBudget(
            {request.request_id: 0 for request in self.running},
            self.max_num_scheduled_tokens,
            ledger.books.room_for_drafts(ledger.accounts.values()) if self.num_spec_tokens else [],
            self._next_in_line(),
        )
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        message = output.kv_connector_metadata
        assert isinstance(message, StepMessage)
        if message.extra is not None:
            output = self._with_extra(output, message.extra)
        if self._postponed:
            for name in output.num_scheduled_tokens:
                self._postponed.pop(name, None)
        if self._step.pausing_for in self._postponed:
            # vLLM did not admit it. Everybody goes on before the next try, whatever the reason was.
            self._postponed[self._step.pausing_for] = 0
        self._end_hopeless()
        return output

    def _end_hopeless(self) -> None:
        """End requests that can never go on; their clients hear of it with the next outputs."""
        ends, self.kv_cache_manager.ends = self.kv_cache_manager.ends, {}
        for name, status in ends.items():
            if status == RequestStatus.FINISHED_ERROR:
                logger.error(
                    "KV eviction: request %s can never fit the KV cache and was ended with an error", name
                )
            self._ended += self.finish_requests(name, status)

    def has_requests(self) -> bool:
        """Whether there is something to do, if only to tell the workers which prefixes they drop."""
        return super().has_requests() or self.kv_cache_manager.outbox.has_drops

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the cache; with ``reset_running_requests`` all prompts and answers are read and evicted again."""
        if reset_running_requests:
            self.kv_cache_manager.clear_kept()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        ended, self._ended = self._ended, []
        for request in ended:
            last = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        finished: list[Request] = super().finish_requests(*args, **kwargs)
        for request in finished:
            self._postponed.pop(request.request_id, None)
        return finished

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether vLLM goes on with a waiting request in this step; else it passes over it.

        Of one that reads no cached prefix (``prompt_logprobs``) vLLM does not hear the connector's answer. Where it
        has to wait, nobody behind it in the queue would begin.
        """
        ready: bool = super()._handle_blocked_waiting_request(request)
        ledger = self.kv_cache_manager
        if not ready or not request.skip_reading_prefix_cache or request.num_computed_tokens:
            return ready
        return ledger.adapters.has_slot(request) and not ledger.gate.turn_away(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Limit the tokens that a step computes of a request; vLLM asks before it allocates them, 0 is none.

            prompt  |---- step ----|---- step --|        |---- step ----|  decode, decode, ...
                    0              |            position (evicted there)
                                   |            |
                                   |            +- waits while it is unknown what, or how much, it keeps
                                   +- ends at most at the position: rows behind it must see the compressed cache

        It computes nothing either while it waits for a step that can read it whole, while everybody pauses for
        such a prompt, and once its answer is as long as it may be. Where one waits, nobody behind it in the queue
        begins.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        step = self._step
        is_running = request.request_id in step.taken
        others_pause = step.pausing_for not in (None, request.request_id)
        pauses = others_pause if is_running else step.queue_waits
        # Steps that run ahead of their outputs would go on beyond the answer's end, where there may be no memory.
        done = num_computed_tokens >= request.num_prompt_tokens + request.max_tokens - 1
        if pauses or done or self.kv_cache_manager.must_wait(request.request_id):
            left = 0
        else:
            left = self._cut_at_eviction(request, num_computed_tokens, num_new_tokens)
        if left > 1 and is_running:
            left = self._cut_drafts(request, left)
        if not is_running and num_new_tokens > 0 and left == 0:
            step.put_off()
        step.spend(request.request_id, left)
        return left

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Limit the tokens that a step computes of a prompt, so that layers with states keep them where others may go
        on; vLLM asks where prefixes are cached.

        Not if there is only room for the prompt when one step reads it whole.
        """
        found = num_new_local_computed_tokens, num_external_computed_tokens
        start = request.num_computed_tokens + sum(found)
        is_read = start >= max(request.num_prompt_tokens, request.num_tokens - 1)
        # Behind an eviction nothing is kept.
        if is_read or start >= whole_until(self.kv_cache_manager.plan(request)):
            return num_new_tokens
        left: int = super()._mamba_block_aligned_split(request, num_new_tokens, *found)
        ends = self.kv_cache_manager.shared.uncompressed.ends(request)
        left = min((end - start for end in ends if 0 < end - start < left), default=left)
        return num_new_tokens if not start and self._fits_whole_only(request, num_new_tokens, left) else left

    def _fits_whole_only(self, request: Request, whole: int, part: int) -> bool:
        """Whether a prompt would begin now if a step computed ``whole`` tokens of it, and not with a part of them."""
        ledger = self.kv_cache_manager
        plan = ledger.plan(request)
        reads_whole = part < plan.evicted_at and plan.is_read_by(min(whole, plan.evicted_at))
        if not reads_whole or not ledger.bounds.gains_from_one_step(plan):
            return False
        return not ledger.gate.would_admit(request, part)

    def _cut_drafts(self, request: Request, num_new_tokens: int) -> int:
        """How many of the tokens a running request computes: no drafts that an answer of full length has no place for,
        or that would cost others their pages."""
        computed = request.num_computed_tokens
        known = request.num_tokens - computed
        last = request.num_prompt_tokens + request.max_tokens - 1
        num_new_tokens = min(num_new_tokens, max(known, last - computed))
        if num_new_tokens <= known:
            return num_new_tokens
        ledger = self.kv_cache_manager
        num_new_tokens = min(num_new_tokens, ledger.others.end_of_blocks(request) - computed)
        more = ledger.accounts[request.request_id].growth(request.num_tokens, computed + num_new_tokens)
        return num_new_tokens if self._step.spend_on_drafts(more) else known

    def _cut_at_eviction(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of the tokens a step may compute; 0 for a prompt that is better read in a later step."""
        plan = self.kv_cache_manager.plan(request)
        phase = plan.phase_at(num_computed_tokens)
        if phase is None:
            return num_new_tokens
        position = phase.next_eviction(num_computed_tokens)
        # Rows behind an eviction must see the compressed cache, so they go into a later step.
        left = position - num_computed_tokens
        if num_new_tokens < left:
            if num_computed_tokens == 0 and self._waits_for_whole_step(request, plan, num_new_tokens):
                self._postponed[request.request_id] = self._postponed.get(request.request_id, 0) + 1
                return 0
            return num_new_tokens
        if phase.extra_tokens(position) and not self.kv_cache_manager.extra_tokens.acquire_for_probe(
            request.request_id
        ):
            return left - 1
        # Drafts may be rejected, so the step that evicts computes none.
        return left if left <= max(1, request.num_tokens - num_computed_tokens) else left - 1

    def _waits_for_whole_step(self, request: Request, plan: Plan, num_new_tokens: int) -> bool:
        """Whether a prompt, of which this step has room for a part, should be read in one step.

        It is then evicted layer by layer and needs less memory. Where memory is not short, it waits for one step at
        most, if that will have room for all of it. Otherwise it waits for such a step; if the prompt fits the pool in
        no other way, also where decodes leave no room: none is admitted before it, so they end, or pause for it.

        A prompt with images does not wait: the memory of encoders may never have room for all of it.
        """
        ledger = self.kv_cache_manager
        if plan.prompt is None or not ledger.bounds.gains_from_one_step(plan) or request.has_encoder_inputs:
            return False
        soon = plan.prompt.end <= self._tokens_next_step()
        if ledger.gate.would_admit(request, num_new_tokens):
            # Where states are kept it is read in parts anyway.
            is_in_parts = self.need_mamba_block_aligned_split
            return soon and not is_in_parts and request.request_id not in self._postponed
        return soon or not ledger.bounds.fits(plan, request.num_tokens, in_one_step=False)

    def _tokens_next_step(self) -> int:
        """Tokens that the next step will have for new prompts."""
        tokens: int = self.max_num_scheduled_tokens
        for request in self.running:
            done = request.num_computed_tokens + self._step.taken.get(request.request_id, 0)
            most = max(1 + self.num_spec_tokens, request.num_tokens - done)
            tokens -= min(most, self.kv_cache_manager.bounds.longest_step)
        return tokens

    def _next_in_line(self) -> str | None:
        """The head of the queue, if it was put off too often and would be admitted: then everybody else pauses."""
        if not self._postponed or not self.waiting or not self._admits_requests():
            return None
        request, ledger = self.waiting.peek_request(), self.kv_cache_manager
        if self._postponed.get(request.request_id, 0) < MOST_POSTPONED or request.num_stale_output_tokens:
            return None
        if not ledger.adapters.has_slot(request) or ledger.shared.is_awaited(request):
            return None
        if ledger.get_computed_blocks(request)[1]:
            return None
        prompt = ledger.plan(request).prompt
        whole_step = request.num_tokens if prompt is None else prompt.end
        return request.request_id if ledger.gate.would_admit(request, whole_step) else None

    def _admits_requests(self) -> bool:
        """Whether vLLM admits requests at all: not while it is paused, and not without a seat."""
        return self.pause_state == PauseState.UNPAUSED and self._free_seats > 0

    def _with_extra(self, output: SchedulerOutput, extra: ExtraTokens) -> SchedulerOutput:
        """The same step with extra tokens, as a request of their own that ends with it."""
        request, scratch = self.requests[extra.request_id], self._scratch
        tokens, first = _tokens_of(extra, request, self.kv_cache_manager.plan(request))
        # One token more than is computed, so that nothing is sampled.
        with_end = [*tokens, tokens[-1]]
        rows = NewRequestData(
            req_id=extra.name,
            prompt_token_ids=with_end,
            prefill_token_ids=with_end,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0),
            pooling_params=None,
            block_ids=scratch.tables(extra.request_id, first, len(tokens)),
            num_computed_tokens=first,
            lora_request=request.lora_request,
        )
        count = len(tokens) - first
        output.scheduled_new_reqs.append(rows)
        output.num_scheduled_tokens[extra.name] = count
        self.finished_req_ids.add(extra.name)
        copies = [*(output.kv_cache_block_copies or ()), *scratch.copies(extra.request_id)]
        total = output.total_num_scheduled_tokens + count
        return replace(output, total_num_scheduled_tokens=total, kv_cache_block_copies=copies or None)


def _tokens_of(extra: ExtraTokens, request: Request, plan: Plan) -> tuple[list[int], int]:
    """The tokens that vLLM is to read for extra tokens, the prompt's before them included, and the first of them that
    a step computes."""
    assert request.prompt_token_ids is not None
    part = plan.part_of(extra.start)
    if not schedule_of(part).repeats_prompt:
        return request.prompt_token_ids[: extra.stop], extra.start
    n = part.repeated_at
    prompt = request.prompt_token_ids[:n]
    prompts = RequestOptions.of(request.sampling_params).rendered.repeat or RepeatPrompts()
    return [*prompt, *prompts.behind(prompt).rows(prompt, extra.start, extra.stop)], n


class AsyncEvictionScheduler(EvictionScheduler, AsyncScheduler):
    """Scheduling that runs ahead of the workers' reports."""
