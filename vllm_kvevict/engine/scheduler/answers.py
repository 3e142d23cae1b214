"""Answers that end where the memory does.

Owns which requests get fewer tokens than they asked for: once it is known what a request keeps, it is known how long
its answer can be. It could not grow beyond that even alone, so without the limit it would be preempted for ever.
"""

from collections.abc import Sequence
from functools import partial

from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import last_that


def _holds(count: PageCount, rank: RankCapacity, tokens: int) -> bool:
    """Whether a rank can hold so many tokens of a request, if it holds nothing else."""
    return count.at(tokens) <= rank.pages


class AnswerLimits:
    """Those of all requests; vLLM checks ``max_tokens`` of each."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[Request, int]] = {}
        """Requests whose answers are limited, and the tokens that they asked for."""

    def limit(
        self, request: Request, account: Account, ranks: Sequence[RankCapacity], max_model_len: int
    ) -> None:
        """End an answer where the memory ends, if it is known what is kept."""
        if not account.is_evicted:
            return
        last = most = min(account.last_token, max_model_len)
        for count, rank in zip(account.counts, ranks, strict=True):
            if count.at(max(last, count.tokens)) > rank.pages:
                most = min(most, last_that(partial(_holds, count, rank), count.tokens, last))
        if most < last:
            # vLLM looks at the limit when a token comes: there must be one more.
            tokens = max(request.num_output_tokens + 1, most - account.prompt_len + 1)
            self._asked.setdefault(request.request_id, (request, request.max_tokens))
            request.max_tokens = tokens
            account.end_answer(tokens)

    def lift(self) -> None:
        """All answers may have again what was asked for."""
        for request, max_tokens in self._asked.values():
            request.max_tokens = max_tokens
        self._asked.clear()

    def forget(self, name: str) -> None:
        """A request is finished."""
        self._asked.pop(name, None)
