"""Whether both programs compute the same thing: greedy answers, and how much of the KV they keep.

The benchmark's model is random, and the rounding of bf16 moves its logits by about as much as its most likely tokens
differ (transformers in bf16 found the first token of transformers in float32 in five of eight prompts). So answers in
bf16 part early; that our first token is among the five most likely of 512 is what shows that both run the same model.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.sides import Engine, Side, Workload
from benchmarks.kvpress.opponent import Opponent
from vllm_kvevict.schedules.reports import Report

CHECKED_TOKENS = 16
LEAST_LIKELY = 0.9
"""Share of the requests whose first token must be among transformers' most likely ones."""
KEPT_APART = 0.01
"""How far both may differ in how many entries they keep, as a share."""


def answer(engine: Engine, workload: Workload, policy: str) -> tuple[list[list[int]], int]:
    """In the engine's process: answer all requests and listen to the reports of their evictions.

    Returns:
        Token ids, [requests][output_len], and the entries that evictions kept, of all requests together.
    """
    from vllm import SamplingParams

    ledger = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    on_report = ledger.on_report
    reports: list[Report] = []

    def listen(rank: int, request_id: str, report: Report) -> Any:
        reports.append(report)
        return on_report(rank, request_id, report)

    params = SamplingParams(
        max_tokens=workload.output_len, temperature=0, ignore_eos=True, extra_args={"kv_eviction": policy}
    )
    ledger.on_report = listen
    try:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts()]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    finally:
        ledger.on_report = on_report
    kept = [report.part.kept for report in reports if report.part is not None]
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    return ids, sum(sum(row) for part in kept for row in part)


def check(
    side: Side, opponent: Opponent, workload: Workload, policy: str | None, budget: float
) -> dict[str, Any]:
    """Let both answer the same requests.

    Args:
        policy: of both; None: our engine without eviction and plain transformers.

    Returns:
        likely_first: share of the requests where our first token is among transformers' five most likely.
        ours_kept, kvpress_keeps: entries of all layers, KV heads and requests after the prefill; ours only with a
            policy.
    """
    ours, kept = side.call(answer, workload, policy or "full")
    theirs = opponent.generate(workload.prompts(), workload.output_len, policy, budget)
    likely = [mine[0] in five for mine, five in zip(ours, theirs["likely"], strict=True)]
    return {
        "likely_first": sum(likely) / len(likely),
        "kvpress_keeps": theirs["entries"],
        **({"ours_kept": kept} if policy else {}),
    }


def require_same(checks: Mapping[str, dict[str, Any]]) -> None:
    """Compare only what computes the same.

    Raises:
        RuntimeError: another model, or entries of another count.
    """
    for name, found in checks.items():
        theirs = found["kvpress_keeps"]
        kept = found.get("ours_kept", theirs)  # without a policy: all, on both sides
        if found["likely_first"] < LEAST_LIKELY or abs(kept - theirs) > KEPT_APART * theirs:
            raise RuntimeError(f"both do not compute the same: {name}: {found}")
