"""Questions with known answers: each is asked with every column, and its replies are scored."""

import time
from collections.abc import Sequence

from vllm_kvevict.quality.cases import Case
from vllm_kvevict.quality.results import TURNS, Column, Result
from vllm_kvevict.quality.run import Task, asked_fields, prefix_len


class Asking(Task[int, Result]):
    """What `run` does; a case's columns share where its question begins, 0 if none of them needs that."""

    KIND = Result

    async def check(self) -> None:
        """See Task; a plain server is asked as it is."""
        if not self.options.plain:
            await super().check()

    async def ask(self, case: Case, columns: Sequence[Column]) -> int:
        """See Task."""
        needed = any(column.scope in ("prefix", TURNS) for column in columns)
        return await prefix_len(self.endpoint, case) if needed else 0

    async def score(self, case: Case, asked: int, column: Column) -> Result:
        """See Task."""
        fields = {} if self.options.plain else asked_fields(column)
        if column.scope == "prefix":
            fields["kv_prefix_len"] = asked
        started = time.perf_counter()
        reply = await self.endpoint.ask(case.prompt(), case.max_tokens, fields)
        seconds = time.perf_counter() - started
        evict_at = reply.prompt_tokens if column.scope == "prompt" else asked
        if column.budget is None:
            evict_at = None
        return Result(
            *case.sample,
            *column.key,
            score=case.score(reply.text),
            reply=reply.text,
            expected=case.expected,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            finish_reason=reply.finish_reason,
            evict_at=evict_at,
            whole=evict_at is not None and evict_at < self.options.min_prompt,
            request=reply.request,
            seconds=round(seconds, 3),
        )
