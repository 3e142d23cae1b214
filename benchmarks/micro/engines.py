"""Engines step by step: hand them requests, read prompts, drop them."""

from typing import Any

from benchmarks.harness.sides import Engine, Workload

CHUNK = 2048
"""Tokens of a step at most, on both sides."""


def admit(engine: Engine, workload: Workload) -> None:
    """Hand the requests to the engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(workload.prompts()):
        engine.llm.llm_engine.add_request(f"{workload.seed}-{index}", {"prompt_token_ids": prompt}, params)


def prefill(engine: Engine) -> None:
    """Work on the prompts until every request decodes."""
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in requests(engine)):
        engine.llm.llm_engine.step()


def drop(engine: Engine) -> None:
    """Abort all requests."""
    engine.llm.llm_engine.abort_request([r.request_id for r in requests(engine)], internal=True)


def requests(engine: Engine) -> list[Any]:
    """vLLM's requests that are not finished."""
    return list(engine.probe.scheduler.requests.values())


def output_len(batch: int, context: int, steps: int) -> int:
    """Tokens that the first request writes until the last block is done, ``steps`` after the last prompt is read."""
    # A step reads at most CHUNK tokens, of which decoding requests take one each; a prompt's end may cut it short.
    reading = -(-batch * context // (CHUNK - batch)) + batch
    return reading + steps + 1
