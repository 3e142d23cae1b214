"""Requests that all arrive at once, and what a server shows until they are answered, in the demo."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from openai import AsyncOpenAI

from benchmarks.harness.kept import Run
from benchmarks.harness.server import Server, Snapshot


@dataclass(frozen=True)
class Load:
    """Requests of random tokens.

    Attributes:
        requests: sent at once.
        prompt_tokens, output_tokens: of each.
        words: ids that prompts are drawn from.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    words: range

    def prompts(self, number: int) -> list[list[int]]:
        """Those of a round; another round has others, so that no cache knows them."""
        choose = random.Random(number)
        return [choose.choices(self.words, k=self.prompt_tokens) for _ in range(self.requests)]


async def measure(
    name: str,
    server: Server,
    load: Load,
    number: int,
    poll: float,
    on_progress: Callable[[Snapshot], None],
) -> Run:
    """Send all requests of a round at once and watch ``/metrics`` until they are answered.

    Args:
        poll: seconds between two looks.
    """
    prompts = load.prompts(number)
    seen = [Snapshot()]
    started = time.perf_counter()
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0) as client:

        async def ask(prompt: list[int]) -> int:
            answer = await client.completions.create(
                model=server.model,
                prompt=prompt,
                max_tokens=load.output_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return answer.usage.completion_tokens if answer.usage else 0

        tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        try:
            while any(not task.done() for task in tasks):
                done, _ = await asyncio.wait(tasks, timeout=poll, return_when=asyncio.FIRST_EXCEPTION)
                server.check()
                for task in done:
                    task.result()
                seen.append(await server.snapshot())
                on_progress(seen[-1])
            seconds = time.perf_counter() - started
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    tokens = sum(task.result() for task in tasks)
    return Run(
        name=name,
        requests=load.requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=tokens,
        seconds=seconds,
        peak=max(seen, key=lambda snapshot: snapshot.running),
        peak_usage=max(snapshot.kv_usage for snapshot in seen),
        final=await server.snapshot(),
    )
