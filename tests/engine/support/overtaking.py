"""Who is overtaken how often: steps that admit others while a request waits that comes before them in vLLM's order."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tests.engine.support.servers import Setup

MOST_OVERTAKEN = 200
"""Steps that may admit others before a request."""

Place = tuple[Any, ...]
"""Where a request stands in vLLM's order; the smallest comes first."""


class Overtaking:
    """Counts for each request the steps in which somebody behind it was admitted and it was not.

    Steps in which vLLM itself skips a request do not count: there is no place for its LoRA adapter, or outputs from
    before it was preempted are still to come. To wait for somebody who reads the same prompt does count.

    Attributes:
        steps: by request id; those before it was admitted the last time are forgotten.
        most: of any request so far.
    """

    def __init__(self, setup: Setup, scheduler: Scheduler):
        self.setup = setup
        self.scheduler = scheduler
        self.steps: Counter[str] = Counter()
        self.most = 0
        self._arrived: dict[str, int] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    def before_step(self) -> None:
        """Note who waits and who runs."""
        scheduler = self.scheduler
        self._running = list(scheduler.running)
        running = {request.request_id for request in self._running}
        for name in scheduler.requests:
            self._arrived.setdefault(name, len(self._arrived))
        self._waiting = [
            request
            for name, request in scheduler.requests.items()
            if name not in running and not (request.num_stale_output_tokens and not request.drop_stale_output)
        ]

    def after_step(self, output: SchedulerOutput) -> None:
        """Count who waited while somebody behind was admitted."""
        names = {new.req_id for new in output.scheduled_new_reqs} | set(
            output.scheduled_cached_reqs.resumed_req_ids
        )
        # Others are probes and repeats.
        admitted = [request for request in self._waiting if request.request_id in names]
        for request in admitted:
            self.steps.pop(request.request_id, None)
        if not admitted:
            return
        last = max(map(self._place, admitted))
        for request in self._waiting:
            if request.request_id in names or request.is_finished() or self._place(request) > last:
                continue
            if not self._lacks_adapter(request, admitted):
                self.steps[request.request_id] += 1
                self.most = max(self.most, self.steps[request.request_id])

    def _place(self, request: Request) -> Place:
        arrived = self._arrived[request.request_id]
        return (request.priority, request.arrival_time, arrived) if self.setup.priority else (arrived,)

    def _lacks_adapter(self, request: Request, admitted: Collection[Request]) -> bool:
        """Whether those in flight, and those admitted before a request's turn, have all places for adapters."""
        if request.lora_request is None:
            return False
        place = self._place(request)
        later = {other.request_id for other in admitted if self._place(other) > place}
        used = {
            other.lora_request.lora_int_id
            for other in (*self._running, *admitted)
            if other.lora_request and other.request_id not in later
        }
        return len(used) >= self.setup.adapters and request.lora_request.lora_int_id not in used
