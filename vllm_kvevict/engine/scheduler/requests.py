"""The requests that the ledger knows of.

Owns the accounts of those in flight, by their ids, and what was found out once of each request until it is finished:
how it is evicted, by what its prefix is found, what reading it takes, also of the reserve, what each rank kept of it.
"""

from collections.abc import Callable, Hashable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import AdmissionControl, Found
from vllm_kvevict.engine.scheduler.nodes import Prefix
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.inputs import PROJECTIONS, ROTARY_EMBEDDING
from vllm_kvevict.schedules.bounds import Known
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Plan

logger = init_logger("vllm.kv_eviction")

KeysOf = Callable[[Request, Plan], dict[int, Hashable]]
"""By what a request finds compressed prefixes, by their tokens, the shortest first."""

NextKey = Callable[[Request, slice, Hashable], Hashable]
"""By what some of a request's tokens are found, behind others that are found by what comes last."""


class Requests:
    """Those in flight, and those that wait.

    Args:
        fewest_read: tokens that one which waits computes at least in its first step.

    Attributes:
        accounts: of requests in flight, by id.
        in_flight: vLLM's requests, by id.
        kept: what each rank keeps of requests, by the positions of complete evictions; a replay keeps it again.
        has_w_o, has_rotary: whether the workers find output projections, and a rotary embedding that can be undone.
        ring_parts: requests whose queries the workers can keep at once.
    """

    def __init__(
        self,
        options: Options,
        control: AdmissionControl,
        keys_of: KeysOf,
        next_key: NextKey,
        fewest_read: int,
    ):
        self.options, self.control = options, control
        self._keys_of, self._next_key, self.fewest_read = keys_of, next_key, fewest_read
        self.accounts: dict[str, Account] = {}
        self.in_flight: dict[str, Request] = {}
        self.kept: dict[str, Known] = {}
        self.has_w_o = self.has_rotary = True
        self.ring_parts = 0
        self._ended_in_lookahead = 0
        self._plans: dict[str, Plan] = {}
        self._keys: dict[str, dict[int, Hashable]] = {}
        self._keys_behind: dict[str, tuple[Hashable, list[Hashable]]] = {}
        """Of the prefix that they were asked for last, and the keys."""
        self._until_read: dict[str, tuple[int, list[int]]] = {}
        self._reserved: dict[str, tuple[int, int]] = {}
        """Read in one step, and in several."""

    def learn(self, has_w_o: bool, has_rotary: bool, ring_parts: int = 0) -> None:
        """What all workers find in the model, and have room for; see the attributes."""
        self.has_w_o, self.has_rotary, self.ring_parts = has_w_o, has_rotary, ring_parts

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any request."""
        return not (self.accounts or self.in_flight or any(self._found_out))

    @property
    def _found_out(self) -> tuple[dict[str, Any], ...]:
        """What was found out of requests, by their ids."""
        return self.kept, self._plans, self._keys, self._keys_behind, self._until_read, self._reserved

    def plan(self, request: Request) -> Plan:
        """When and how the request is evicted."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            plan = RequestOptions.of(request.sampling_params).plan(self.options, request.num_prompt_tokens)
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

    def keys_behind(self, request: Request, prefix: Prefix) -> list[Hashable]:
        """By what a request's tokens behind a prefix are found, those that it has by now: one key for each whole unit
        of ``page_size`` tokens, which includes all before it."""
        root, keys = self._keys_behind.get(request.request_id, (None, []))
        if root != prefix.keys[0]:
            root, keys = prefix.keys[0], []
        unit = self.options.page_size
        first = prefix.tokens + len(keys) * unit
        for start in range(first, request.num_tokens - unit + 1, unit):
            keys.append(self._next_key(request, slice(start, start + unit), keys[-1] if keys else root))
        self._keys_behind[request.request_id] = root, keys
        return keys

    def pages_until_read(self, request: Request) -> list[int]:
        """The most pages of each rank that a waiting request holds until it is read, not layer by layer."""
        tokens, pages = self._until_read.get(request.request_id, (0, []))
        if tokens != request.num_tokens:
            pages = self.control.bounds.until_read(self.plan(request), request.num_tokens, False)
            self._until_read[request.request_id] = request.num_tokens, pages
        return pages

    def reserved(self, request: Request, dims: HeadDims, most: int) -> int:
        """What a waiting request takes of the reserve: numbers for each layer and query head.

        Args:
            most: tokens of its first step. If that reads it whole, most take nothing.
        """
        plan, name = self.plan(request), request.request_id
        if name not in self._reserved:
            in_parts, is_once = plan.reserved(dims), plan.is_read_by(plan.evicted_at)
            self._reserved[name] = plan.reserved(dims, is_once), in_parts
        return self._reserved[name][plan.evicted_at > most]

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

    def clear_kept(self) -> None:
        """What was kept says nothing any more."""
        self.kept.clear()

    def admit(self, request: Request, account: Account) -> None:
        """A request is in flight from now on."""
        self.accounts[request.request_id], self.in_flight[request.request_id] = account, request

    def close(self, request: Request) -> Account | None:
        """A request finished, was aborted or preempted; its account, if it was in flight."""
        self.in_flight.pop(request.request_id, None)
        account = self.accounts.pop(request.request_id, None)
        if account is not None and request.is_finished():
            self._ended_in_lookahead += account.prompt_len <= account.tokens < account.plan.evicted_at
        return account

    def take_ended_in_lookahead(self) -> int:
        """How many requests have ended with their answer begun and their prompt not evicted, since the last call."""
        ended, self._ended_in_lookahead = self._ended_in_lookahead, 0
        return ended

    def remove(self, name: str) -> None:
        """A request is finished, and nobody asks about it any more."""
        for known in self._found_out:
            known.pop(name, None)
