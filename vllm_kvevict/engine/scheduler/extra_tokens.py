"""Whose extra tokens a step computes.

Owns the slot: the workers' buffers have room for one request's extra tokens in a step, which are dropped
after it. So probes and repeats of prompts take turns.
"""

from collections.abc import Mapping

from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.schedules.reports import ExtraTokens


class ExtraTokensSlot:
    """The slot of the step that is being scheduled."""

    def __init__(self, requests: Requests):
        self._requests = requests
        self._repeating: str | None = None
        self._probing: str | None = None
        self._probe_waits = False
        """Whether the step before had no room for a probe, since it repeated a prompt."""

    def begin_step(self, may_repeat: bool) -> None:
        """A step begins; the most urgent prompt that waits for that is repeated, unless it is a probe's turn.

        Args:
            may_repeat: whether it may repeat a prompt at all.
        """
        is_for_probes, self._probe_waits = self._probe_waits, False
        self._probing = None
        self._repeating = None if is_for_probes or not may_repeat else self._next_repeat()

    def _next_repeat(self) -> str | None:
        """Of the most urgent ones the first to be admitted."""
        reading_again = [
            name
            for name, account in self._requests.accounts.items()
            if account.pending is not None and account.pending.chunks
        ]
        return min(reading_again, key=lambda name: self._requests.in_flight[name].priority, default=None)

    def acquire_for_probe(self, request_id: str) -> bool:
        """Let the step compute a request's probe, if the slot is free; else it comes with a later step."""
        if self._repeating is not None:
            self._probe_waits = True
            return False
        if self._probing not in (None, request_id):
            return False
        self._probing = request_id
        return True

    def end_step(self, scheduled: Mapping[str, int]) -> ExtraTokens | None:
        """The step's extra tokens, None if it computes none.

        Args:
            scheduled: its tokens by request: of those who were to probe or to repeat, one may be gone.
        """
        if self._probing is not None and self._probing in scheduled:
            return self._probe(self._probing)
        return None if self._repeating is None else self._repeat(self._repeating)

    def _repeat(self, request_id: str) -> ExtraTokens | None:
        account = self._requests.accounts.get(request_id)
        if account is None or account.pending is None or not account.pending.chunks:
            return None
        start, stop = account.pending.next_chunk()
        return ExtraTokens(f"{request_id}-repeat-{account.epoch}-{start}", request_id, start, stop)

    def _probe(self, request_id: str) -> ExtraTokens:
        account = self._requests.accounts[request_id]
        prompt, position = account.plan.prompt, account.tokens
        assert prompt is not None
        first, n = prompt.end - prompt.extra_tokens(position), prompt.end
        return ExtraTokens(f"{request_id}-probe-{position}", request_id, first, n)
