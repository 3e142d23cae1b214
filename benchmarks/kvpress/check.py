"""Whether both programs compute the same thing: greedy answers, and how much of the KV they keep.

The benchmark's model is random, and the rounding of bf16 moves its logits by about as much as its most likely tokens
differ (transformers in bf16 found the first token of transformers in float32 in five of eight prompts). So answers in
bf16 part early; that our first token is among the five most likely of 512 is what shows that both run the same model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.load import entry_bytes
from benchmarks.harness.scenarios import KV_HEADS, LAYERS
from benchmarks.harness.sides import Engine, Side, Workload
from benchmarks.kvpress.opponent import Opponent
from vllm_kvevict.schedules.reports import Report

LEAST_LIKELY = 0.9
"""Share of the requests whose first token must be among transformers' most likely ones."""
KEPT_APART = 0.01
"""How far both may differ in how many entries they keep, as a share."""


def answer(engine: Engine, workload: Workload, policy: str) -> dict[str, Any]:
    """In the engine's process: answer all requests and listen to the reports of their evictions.

    Returns:
        ids: [requests][output_len].
        entries, pages: kept by all requests together; 0 if none was evicted.
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
        outputs = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in workload.prompts()], params, use_tqdm=False
        )
    finally:
        ledger.on_report = on_report
    parts = [report.part for report in reports if report.part is not None]
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "entries": sum(sum(row) for part in parts for row in part.kept),
        "pages": sum(report.pages for report in reports if report.part is not None),
    }


def leading(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens come before the first difference."""
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one)
    )


def check(
    side: Side, opponent: Opponent, workload: Workload, policy: str | None, budget: float
) -> dict[str, Any]:
    """Let both answer the same requests, kvpress one at a time.

    Args:
        policy: of both; None: our engine without eviction and plain transformers.

    Returns:
        requests: compared; those that kvpress could not answer are left out.
        same_first: share of them whose first tokens are the same.
        likely_first: share of them where our first token is among transformers' five most likely.
        same_tokens: share of their tokens before the first difference.
        ours_kept, kvpress_attends, kvpress_stores: entries per layer, KV head and request after the prefill;
            ours only with a policy.
        ours_pages: held by all requests after the prefill.
    """
    ours = side.call(answer, workload, policy or "full")
    theirs = [
        opponent.generate([prompt], workload.output_len, policy, budget) for prompt in workload.prompts()
    ]
    answered = [(ids, one) for ids, one in zip(ours["ids"], theirs, strict=True) if "error" not in one]
    result: dict[str, Any] = {"requests": len(answered), "ours_pages": ours["pages"]}
    rows = LAYERS * KV_HEADS
    if policy:
        result["ours_kept"] = ours["entries"] / (rows * workload.requests)
    if answered:
        starts = [leading(ids, one["ids"][0]) for ids, one in answered]
        per_row = 1 / (rows * len(answered))
        stored = sum(one["stored_bytes"] for _, one in answered) / entry_bytes(opponent.dtype)
        result |= {
            "same_first": sum(start > 0 for start in starts) / len(answered),
            "likely_first": sum(ids[0] in one["likely"][0] for ids, one in answered) / len(answered),
            "same_tokens": sum(starts) / (len(starts) * workload.output_len),
            "kvpress_attends": sum(one["attended_entries"] for _, one in answered) * per_row,
            "kvpress_stores": stored * per_row,
        }
    return result


def describe(name: str, found: dict[str, Any]) -> str:
    """One line about a check."""
    if not found["requests"]:
        return f"{name}: kvpress answered no request"
    line = (
        f"{name}: {found['requests']} requests, {found['same_first']:.0%} begin with the same token, "
        f"{found['likely_first']:.0%} with one of the five likeliest"
    )
    if "ours_kept" in found:
        line += (
            f"; entries per head: ours keeps {found['ours_kept']:.1f}, kvpress attends to "
            f"{found['kvpress_attends']:.1f} and stores {found['kvpress_stores']:.1f}"
        )
    return line


def require_same(checks: Mapping[str, dict[str, Any]]) -> None:
    """Compare only what computes the same.

    Raises:
        RuntimeError: another model, or entries of another count. Not where kvpress answered nothing.
    """
    for name, found in checks.items():
        if not found["requests"]:
            continue
        attends = found["kvpress_attends"]
        kept = found.get("ours_kept", attends)  # without a policy: all, on both sides
        if found["likely_first"] < LEAST_LIKELY or abs(kept - attends) > KEPT_APART * attends:
            raise RuntimeError(f"both do not compute the same: {describe(name, found)}")
