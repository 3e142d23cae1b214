"""When a request is evicted, and what that means for others: it follows from its configuration and its length."""

import pytest

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import plan_of, plan_of_parts, repeats_prompt, schedule_of

N, WINDOW = 700, 32


def plan(policy: str, budget: int = 100, **params: int) -> Plan:
    return plan_of(EvictionConfig(policy, budget=budget, **params), N)


@pytest.mark.parametrize("kept", [plan_of(EvictionConfig("full"), N), plan("snapkv", N)])
def test_what_is_kept_whole_is_left_for_others(kept: Plan) -> None:
    assert kept.prompt is None and kept.phase_at(0) is None and kept.next_eviction(0) is None
    # The last token is computed in any case.
    assert (kept.most_cached(N), kept.leaves(N)) == (N - 1, N)


def test_one_eviction_follows_the_prompt() -> None:
    once = plan("snapkv", window=WINDOW)
    assert once.prompt is not None and once.prompt.positions == (N,)
    assert [once.next_eviction(tokens) for tokens in (0, N - 1, N)] == [N, N, None]
    # The window's queries choose, and queries are not stored.
    assert (once.most_cached(N), once.leaves(N)) == (N - WINDOW, N)


@pytest.mark.parametrize("ahead", [8, 40])
def test_an_eviction_after_a_lookahead(ahead: int) -> None:
    """The prompt's part of the window is read, and the prompt stays for others, but nothing of the answer."""
    config, end = EvictionConfig("snapkv", budget=100, window=WINDOW), N + ahead
    later = plan_of(config, N, None, ahead)
    assert later.prompt is not None and later.prompt.window == max(WINDOW, ahead)
    assert later.prompt.config.budget_for(N) == 100 + ahead and later.config.budget_for(N) == 100
    assert [later.next_eviction(tokens) for tokens in (0, N, end - 1, end)] == [end, end, end, None]
    assert later.most_cached(N) == min(N - 1, N - WINDOW + ahead)
    assert [later.leaves(N), later.leaves(end), later.leaves_at_end(end - 1)] == [N, N, N]
    assert not later.is_read_by(N)
    assert [later.keeps_queries(2 * N, tokens) for tokens in (0, end - 1, end)] == [True, True, False]
    assert not plan_of(EvictionConfig("knorm", budget=100), N, None, ahead).keeps_queries(2 * N)
    # It is repeated in a step that ends with the prompt, so a replay must not begin with all of it.
    repeated = plan_of(EvictionConfig("kvzip", budget=100), N, None, ahead)
    assert repeated.most_cached(N + ahead) == N - 1 and repeated.next_eviction(N - 1) == N


def test_chunks_are_evicted_one_by_one_with_a_probe() -> None:
    chunked = plan("take", take_chunk=256)
    assert chunked.prompt is not None and chunked.prompt.positions == (256, 512, N)
    assert [chunked.next_eviction(tokens) for tokens in (0, 256, 600)] == [256, 512, N]
    # What follows a chunk is read with it evicted, so nobody shares it.
    assert (chunked.most_cached(N), chunked.leaves(N)) == (0, 0)
    assert chunked.prompt.extra_tokens(256) == chunked.prompt.extra_tokens(512) > 0
    assert [chunked.prompt.extra_tokens(position) for position in (100, N)] == [0, 0]


def test_sums_over_all_queries_need_a_reserve_and_all_tokens() -> None:
    summing, dims = plan("h2o"), HeadDims(16, 2)
    # A number for each token, but none if one step reads all of them.
    assert (summing.reserved(dims), summing.reserved(dims, in_one_step=True)) == (N, 0)
    assert (summing.most_cached(N), summing.leaves(N)) == (0, N)
    assert plan("snapkv").reserved(dims) == 0


def test_a_first_part_alone_keeps_all() -> None:
    """It is there for others that begin with it, and yet nothing of the prompt goes."""
    config = EvictionConfig("snapkv", keep_ratio=0.5)
    alone = plan_of_parts(config, (40, 90), 64, whole=40)
    assert len(alone.parts) == 1 and alone.keeps_all
    assert plan_of_parts(config, (40, 90), 64).keeps_all is False
    assert not plan_of_parts(config, (40, 104), 64, whole=40).keeps_all


def test_a_first_part_that_stays_whole_is_a_part_of_its_own() -> None:
    """However short it is; ends before its own do not count, and it depends on nothing that others may have besides."""
    kvzip = EvictionConfig("kvzip", keep_ratio=0.25)
    plan = plan_of_parts(kvzip, (20, 40, 90, 300), 64, whole=40)
    first, later = plan.parts
    assert (first.begins, first.end, first.config) == (0, 40, EvictionConfig("full"))
    assert (later.begins, later.end, later.config) == (40, 300, kvzip.for_part(260, 40))
    assert plan_of_parts(EvictionConfig("snapkv", keep_ratio=0.5), (40, 300), 64, whole=40).parts[0] == first
    # Nothing of it is repeated, kept in the reserve, or left uncompressed for others.
    assert (
        schedule_of(first).chunks(first, 4096) == []
        and schedule_of(first).layer_budgets(first, 3) == [40] * 3
    )
    assert repeats_prompt(plan) and not repeats_prompt(plan_of_parts(kvzip, (40,), 64, whole=40))
    summing = EvictionConfig("h2o", keep_ratio=0.25)
    assert plan_of_parts(summing, (40,), 64, whole=40).reserved(HeadDims(16, 2)) == 0
    assert (plan.most_cached(310), plan.leaves(310)) == (0, 0)
    # A control: without it they are compressed together.
    assert [part.end for part in plan_of_parts(kvzip, (20, 40, 90, 300), 64).parts] == [90, 300]
