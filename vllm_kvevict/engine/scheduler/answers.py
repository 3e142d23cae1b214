"""Answers that end where the memory does.

Owns which requests get fewer tokens than they asked for: once it is known what a request keeps, it is known how long
its answer can be. It could not grow beyond that even alone, so without the limit it would be preempted for ever.
"""

from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.schedules.bounds import MemoryBounds


class AnswerLimits:
    """Those of all requests; vLLM checks ``max_tokens`` of each."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[Request, int]] = {}
        """Requests whose answers are limited, and the tokens that they asked for."""

    def limit(self, request: Request, account: Account, bounds: MemoryBounds, max_model_len: int) -> None:
        """End an answer where the memory ends, if it is known what is kept."""
        if not account.is_evicted:
            return
        last = min(account.last_token, max_model_len)
        most = bounds.most_tokens_from(account.plan, account.counts, last)
        if most < last:
            # vLLM looks at the limit when a token comes: there must be one more.
            tokens = max(request.num_output_tokens + 1, most - account.prompt_len + 1)
            self._asked.setdefault(request.request_id, (request, request.max_tokens))
            request.max_tokens = tokens
            account.end_answer(account.prompt_len + tokens - 1)

    def lift(self) -> None:
        """All answers may have again what was asked for."""
        for request, max_tokens in self._asked.values():
            request.max_tokens = max_tokens
        self._asked.clear()

    def remove(self, name: str) -> None:
        """A request is finished."""
        self._asked.pop(name, None)
