"""Engines step by step: hand them requests, read prompts, drop them, and time functions of a step from outside."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.sides import Engine, Workload

CHUNK = 2048
"""Tokens of a step at most, on both sides."""
REST = "engine, API and the rest"
Parts = dict[str, float]
"""Seconds of a step by part."""


def admit(
    engine: Engine, workload: Workload, policy: str | None = None, prefix_len: int | None = None
) -> int:
    """Hand the requests to the engine.

    Args:
        policy: of these requests, None for the engine's own.
        prefix_len: tokens of each prompt that are evicted without the others in view, None for all.

    Returns:
        Prompt tokens in all.
    """
    from vllm import SamplingParams

    fields = {"kv_eviction": policy, "kv_prefix_len": prefix_len}
    extra = {name: value for name, value in fields.items() if value is not None}
    params = SamplingParams(
        max_tokens=workload.output_len,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra or None,
    )
    for index, prompt in enumerate(workload.prompts()):
        engine.llm.llm_engine.add_request(f"{workload.seed}-{index}", {"prompt_token_ids": prompt}, params)
    return workload.requests * workload.input_len


def prefill(engine: Engine) -> int:
    """Work on the prompts until every request decodes; prompt tokens read."""
    while (done := prompt_tokens(engine)) < sum(r.num_prompt_tokens for r in requests(engine)):
        engine.llm.llm_engine.step()
    return done


def drop(engine: Engine) -> None:
    """Abort all requests."""
    engine.llm.llm_engine.abort_request([r.request_id for r in requests(engine)], internal=True)


def requests(engine: Engine) -> list[Any]:
    """vLLM's requests that are not finished."""
    return list(engine.probe.scheduler.requests.values())


def prompt_tokens(engine: Engine) -> int:
    """Prompt tokens read so far."""
    return sum(min(r.num_computed_tokens, r.num_prompt_tokens) for r in requests(engine))


def output_len(batch: int, context: int, steps: int) -> int:
    """Tokens that the first request writes until the last block is done, ``steps`` after the last prompt is read."""
    # A step reads at most CHUNK tokens, of which decoding requests take one each; a prompt's end may cut it short.
    reading = -(-batch * context // (CHUNK - batch)) + batch
    return reading + steps + 1


@dataclass
class Stopwatch:
    """Times functions exclusively: while one that it calls is at work, the caller's time stands still."""

    parts: Parts = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=lambda: [REST])
    _since: float = 0.0

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count a function's time for a part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, name, timed)

    def _switch(self) -> None:
        now = time.perf_counter()
        self.parts[self._open[-1]] += now - self._since
        self._since = now

    def run(self, work: Callable[[], Any]) -> Parts:
        """Run something and say where its time went."""
        self.parts.clear()
        self._since = time.perf_counter()
        work()
        self._switch()
        return dict(self.parts)


stopwatch = Stopwatch()
