"""The requests that the ledger knows of.

Owns the accounts of those in flight, by their ids, and what was found out once of each request until it is finished:
how it is evicted, by what its prefix is found, what reading it takes, what each rank kept of it.
"""

from collections.abc import Callable, Hashable

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import AdmissionControl, Found
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.inputs import PROJECTIONS, ROTARY_EMBEDDING
from vllm_kvevict.schedules.bounds import Known
from vllm_kvevict.schedules.plan import Plan

logger = init_logger("vllm.kv_eviction")

KeysOf = Callable[[Request, Plan], dict[int, Hashable]]
"""By what a request finds compressed prefixes, by their tokens, the shortest first."""


class Requests:
    """Those in flight, and those that wait.

    Args:
        fewest_read: tokens that one which waits computes at least in its first step.

    Attributes:
        accounts: of requests in flight, by id.
        in_flight: vLLM's requests, by id.
        kept: what each rank keeps of requests, by the positions of complete evictions; a replay keeps it again.
        has_w_o, has_rotary: whether the workers find output projections, and a rotary embedding that can be undone.
        ring_parts: answers whose queries the workers can keep at once.
    """

    def __init__(self, options: Options, control: AdmissionControl, keys_of: KeysOf, fewest_read: int):
        self.options, self.control = options, control
        self._keys_of, self.fewest_read = keys_of, fewest_read
        self.accounts: dict[str, Account] = {}
        self.in_flight: dict[str, Request] = {}
        self.kept: dict[str, Known] = {}
        self.has_w_o = self.has_rotary = True
        self.ring_parts = 0
        self._plans: dict[str, Plan] = {}
        self._keys: dict[str, dict[int, Hashable]] = {}
        self._until_read: dict[str, tuple[int, list[int]]] = {}

    def learn(self, has_w_o: bool, has_rotary: bool, ring_parts: int = 0) -> None:
        """What all workers find in the model, and have room for; see the attributes."""
        self.has_w_o, self.has_rotary, self.ring_parts = has_w_o, has_rotary, ring_parts

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any request."""
        return not (
            self.accounts or self.in_flight or self.kept or self._plans or self._keys or self._until_read
        )

    def plan(self, request: Request) -> Plan:
        """When and how the request is evicted."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            params = request.sampling_params
            plan = self.options.plan(request.num_prompt_tokens, params.extra_args if params else None)
            if plan.prompt and (lacking := self._lacking(plan.config)):
                logger.warning_once(
                    "KV eviction: kv_eviction=%s needs %s, which this model lacks, so such requests are kept whole",
                    plan.config.policy,
                    lacking,
                )
                plan = Plan(plan.config, plan.phases[len(plan.parts) :])
            self._plans[request.request_id] = plan
        return plan

    def _lacking(self, config: EvictionConfig) -> str | None:
        """What a policy needs of the model and the workers do not find in it."""
        found = {PROJECTIONS: self.has_w_o, ROTARY_EMBEDDING: self.has_rotary}
        return next((part.words for part in config.needs_of_model if not found[part]), None)

    def keys(self, request: Request) -> dict[int, Hashable]:
        """What a request's prefixes are cached under, by their tokens; none if it has none that could be cached."""
        name = request.request_id
        if name not in self._keys:
            self._keys[name] = self._keys_of(request, self.plan(request))
        return self._keys[name]

    def pages_until_read(self, request: Request) -> list[int]:
        """The most pages of each rank that a waiting request holds until it is read, not layer by layer."""
        tokens, pages = self._until_read.get(request.request_id, (0, []))
        if tokens != request.num_tokens:
            pages = self.control.bounds.until_read(self.plan(request), request.num_tokens, False)
            self._until_read[request.request_id] = request.num_tokens, pages
        return pages

    def open(self, request: Request, num_new_tokens: int, begins_with: Found | None = None) -> Account:
        """The account of a request whose first step has so many tokens, beside what it finds cached."""
        return self.control.open(
            self.plan(request),
            num_new_tokens,
            request.num_prompt_tokens,
            request.max_tokens,
            prefill_len=request.num_tokens,
            preemptions=request.num_preemptions,
            replayed=self.kept.get(request.request_id),
            begins_with=begins_with,
        )

    def keep(self, name: str, account: Account) -> None:
        """It is known what each rank keeps of a request; of earlier evictions only the prompt's matter still."""
        known, last = self.kept.get(name, {}), account.plan.evicted_at
        of_prompt = {position: counts for position, counts in known.items() if position <= last}
        self.kept[name] = {**of_prompt, account.counts[0].tokens: tuple(account.counts)}

    def forget_kept(self) -> None:
        """What was kept says nothing any more."""
        self.kept.clear()

    def admit(self, request: Request, account: Account) -> None:
        """A request is in flight from now on."""
        self.accounts[request.request_id], self.in_flight[request.request_id] = account, request

    def leave(self, request: Request) -> Account | None:
        """A request finished, was aborted or preempted; its account, if it was in flight."""
        name = request.request_id
        if request.is_finished():
            for known in (self.kept, self._plans, self._keys, self._until_read):
                known.pop(name, None)
        self.in_flight.pop(name, None)
        return self.accounts.pop(name, None)
