"""The ledger's arithmetic, request by request."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.request import Request

from tests.engine.support.servers import PAGE, Setup, Shape, make_request, make_scheduler
from tests.engine.support.simulation import Simulation
from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.messages import Holdings
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.schedules.reports import Report


def make_ledger(
    pages: Sequence[int], shapes: Sequence[Shape] = ((2, 2),), max_model_len: int = 1024, **options: Any
) -> PageLedger:
    """A ledger over pools of these sizes, with a budget of one fifth unless told otherwise."""
    settings = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, **options}
    ledger = make_scheduler(Setup(shapes, pages, max_model_len, options=settings)).kv_cache_manager
    assert isinstance(ledger, PageLedger)
    return ledger


def grow(ledger: PageLedger, request: Request, tokens: int) -> bool:
    """Schedule ``tokens`` more of a request, as vLLM does."""
    if ledger.allocate_slots(request, tokens) is None:
        return False
    request.num_computed_tokens += tokens
    return True


def read(ledger: PageLedger, request: Request, tokens: int) -> bool:
    """Schedule ``tokens`` of a prompt in two steps, so that it is not evicted layer by layer."""
    return grow(ledger, request, tokens - 1) and grow(ledger, request, 1)


def report(epoch: int, tokens: int, lengths: Sequence[int]) -> Report:
    """What a rank says whose rows keep these lengths."""
    pages = sum(-(-length // PAGE) for length in lengths)
    residues = [sum(length % PAGE == residue for length in lengths) for residue in range(PAGE)]
    return Report(epoch, tokens, pages, residues, None)


def replayed(name: str, prompt: int, outputs: int, max_tokens: int = 300) -> Request:
    """A request that was preempted after so many outputs."""
    request = make_request(name, prompt, max_tokens)
    request.append_output_token_ids([7] * outputs)
    request.num_preemptions = 1
    return request


def test_a_prefill_holds_its_chunks_and_is_promised_its_peak() -> None:
    ledger = make_ledger([1000])
    request = make_request("r", 640, 10)
    assert grow(ledger, request, 100)
    assert (ledger.books.used, ledger.books.promised) == ([4 * 4], [4 * 20 - 4 * 4])
    assert grow(ledger, request, 540)
    assert (ledger.books.used, ledger.books.promised) == ([4 * 20], [0])
    assert list(ledger.outbox.admitted) == ["r"]


@pytest.mark.parametrize("lacks, kept_whole", [("has_w_o", "criticalkv"), ("has_rotary", "compactor")])
def test_policies_keep_everything_where_workers_lack_what_they_read(lacks: str, kept_whole: str) -> None:
    ledger = make_ledger([1000], policy="full", policies="all")
    ledger.requests.learn(**{"has_w_o": True, "has_rotary": True, lacks: False})
    for policy in (kept_whole, "lava", "h2o"):
        request = make_request(policy, 640, 10, {"kv_eviction": policy})
        assert (ledger.plan(request).prompt is None) == (policy == kept_whole)


def test_a_decode_does_not_take_what_is_promised() -> None:
    ledger = make_ledger([4 * 33], budget=1.0)
    decode, prefill = make_request("decode", 320, 30), make_request("prefill", 640, 1)
    assert grow(ledger, decode, 320)
    assert grow(ledger, prefill, 100)
    assert ledger.books.used[0] + ledger.books.promised[0] == 4 * (10 + 20)
    for _ in range(3 * PAGE):
        assert grow(ledger, decode, 1)
    assert not grow(ledger, decode, 1)
    assert ledger.books.used[0] + ledger.books.promised[0] == 4 * 33
    assert grow(ledger, prefill, 540)


def test_a_report_puts_the_counts_of_its_rank_in_place() -> None:
    ledger = make_ledger([1000, 1000], shapes=[(2, 2), (1, 2)])
    request = make_request("r", 320, 100)
    assert read(ledger, request, 320)
    assert grow(ledger, request, 1)
    assert ledger.books.used == [4 * 11, 2 * 11]
    assert ledger.awaits_reports
    # The step that follows the eviction was counted already: 321 tokens.
    ledger.on_report(0, "r", report(1, 320, [32, 64, 33, 127]))
    assert ledger.books.used == [2 + 3 + 2 + 4, 2 * 11]
    assert ledger.awaits_reports
    ledger.on_report(1, "r", report(1, 320, [64, 64]))
    assert ledger.books.used == [11, 6]
    assert not ledger.awaits_reports
    assert grow(ledger, request, 1)
    assert ledger.books.used == [12, 6]  # the row of 127 takes a page with its second token


@pytest.mark.parametrize("name, epoch", [("r", 1), ("other", 2)])
def test_a_report_without_an_account_is_dropped(name: str, epoch: int) -> None:
    ledger = make_ledger([1000])
    request = replayed("r", 320, 5)
    assert grow(ledger, request, 320)
    before = list(ledger.books.used)
    ledger.on_report(0, name, report(epoch, 320, [64] * 4))
    assert ledger.books.used == before and ledger.awaits_reports


def test_a_replay_is_promised_its_end_and_after_the_report_exactly_that() -> None:
    ledger = make_ledger([1000])
    request = replayed("r", 320, 500)
    assert grow(ledger, request, 320)
    # In each layer two rows that share 2 * 64 entries, with 500 more each, and end anywhere in a page.
    assert ledger.books.used[0] + ledger.books.promised[0] == 2 * ((2 * 564 + 2 * (PAGE - 1)) // PAGE)
    ledger.on_report(0, "r", report(2, 320, [1, 127, 64, 64]))
    assert ledger.books.used[0] == 1 + 4 + 2 + 2
    assert ledger.books.used[0] + ledger.books.promised[0] == 16 + 20 + 18 + 18
    assert grow(ledger, request, 500)
    assert (ledger.books.used, ledger.books.promised) == ([16 + 20 + 18 + 18], [0])


def test_a_rank_is_promised_the_most_that_its_heads_may_win() -> None:
    """Two heads of four, whose rivals keep nothing but the window and the safeguard."""
    ledger = make_ledger([1000, 1000], shapes=[(1, 2), (1, 2)], budget=0.5)
    request = replayed("r", 320, 400, max_tokens=400)
    assert read(ledger, request, 320)
    most = 4 * 160 - 2 * (32 + (160 - 32) // 5) + 2  # and rounding
    assert ledger.books.promised == [(most + 2 * 400 + 2 * (PAGE - 1)) // PAGE - 20] * 2


def test_a_limit_leaves_room_for_the_token_that_ends_the_answer() -> None:
    """Alone in its pool a request of 640 tokens that keeps 128 of each row grows to 640; of a replay that has more
    tokens than that already, one more is wanted, which then has no place."""
    for outputs, limit in ((0, 513), (700, 701)):
        ledger = make_ledger([4 * 20], policy="snapkv", max_model_len=640)
        ledger.max_model_len = 4096
        request = make_request("r", 640, 2000)
        assert read(ledger, request, 640)
        request.append_output_token_ids([7] * outputs)
        ledger.on_report(0, "r", report(1, 640, [128] * 4))
        assert request.max_tokens == limit


def test_a_replay_that_keeps_more_than_before_never_overflows() -> None:
    """Rounding may let a replay choose otherwise, so a rank may hold more than the ledger promised beforehand."""
    ledger = make_ledger([66, 66], shapes=[(1, 2), (1, 2)], budget=0.5)
    first, second = replayed("first", 320, 400, max_tokens=400), replayed("second", 320, 150, max_tokens=150)
    before = PageCount.from_residues(10, 320, [2] + [0] * (PAGE - 1))
    ledger.requests.kept.update(first={320: [before, before]}, second={320: [before, before]})
    assert read(ledger, first, 320)
    assert read(ledger, second, 320)
    for name in ("first", "second"):
        ledger.on_report(0, name, report(2, 320, [1, 1]))
        ledger.on_report(1, name, report(2, 320, [319, 319]))
    assert (ledger.books.used[1], ledger.books.promised[1]) == (20 + 20, 26 + 10)
    assert grow(ledger, first, 400)
    assert ledger.books.used[1] == 66
    assert not grow(ledger, second, 150)  # promised, but there are no such pages
    ledger.free(first)
    assert grow(ledger, second, 150)


def test_a_request_keeps_its_plan_from_one_admission_to_the_next() -> None:
    ledger = make_ledger([1000])
    request = make_request("r", 640, 10)
    plan = ledger.plan(request)
    assert grow(ledger, request, 100)
    first = ledger.outbox.admitted["r"]
    assert (first.epoch, first.plan) == (1, plan)
    ledger.free(request)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert grow(ledger, request, 100)
    second = ledger.outbox.admitted["r"]
    assert second.epoch == 2 and second.plan is plan and plan.prompt.end == 640


@pytest.mark.parametrize(
    "outputs, max_tokens, expected",
    [(0, 8, 8), (0, 300, 50), (20, 300, 50), (100, 300, 200), (100, 150, 150), (300, 2000, 424)],
)
def test_outputs_are_expected_up_to_the_reserve_or_twice_what_came(
    outputs: int, max_tokens: int, expected: int
) -> None:
    """... but never beyond max_tokens or the longest sequence, for running requests and replays alike."""
    ledger = make_ledger([4000], decode_reserve=50, budget=1.0)
    request = replayed("r", 600, outputs, max_tokens)
    assert ledger.requests.control.expected_end(ledger.requests.open(request, 100)) == 600 + expected
    assert grow(ledger, request, 600 + outputs)
    assert ledger.requests.control.expected_end(ledger.accounts["r"]) == 600 + expected


def test_what_is_held_at_the_end_is_exact_once_evicted() -> None:
    ledger = make_ledger([1000])
    request = make_request("r", 320, 100)
    assert read(ledger, request, 320)
    account = ledger.accounts["r"]
    assert ledger.requests.control.expected_pages(account, 0, 420) == 4 * (64 + 100 + PAGE // 2) // PAGE
    ledger.on_report(0, "r", report(1, 320, [1, 127, 64, 64]))
    assert ledger.requests.control.expected_pages(account, 0, 420) == 4 + 8 + 6 + 6


def test_usage_is_that_of_the_fullest_rank() -> None:
    ledger = make_ledger([1000, 500], shapes=[(2, 2), (1, 2)])
    assert ledger.usage == 0
    assert grow(ledger, make_request("r", 640, 10), 640)
    assert ledger.usage == max(4 * 20 / 1000, 2 * 20 / 500)


def test_verify_compares_requests_and_totals() -> None:
    ledger = make_ledger([1000])
    request = make_request("r", 640, 10)
    assert grow(ledger, request, 100)
    ledger.verify(0, Holdings({"r": (1, 100, 16), "gone": (1, 5, 99)}))
    ledger.verify(0, Holdings({"r": (2, 100, 99)}))  # of another admission
    with pytest.raises(
        RuntimeError, match="holds 17 pages of request r at 100 tokens, the ledger expects 16"
    ):
        ledger.verify(0, Holdings({"r": (1, 100, 17)}))
    ledger.books.used = [15]
    with pytest.raises(RuntimeError, match="ledger of rank 0 sums to 16, not 15"):
        ledger.verify(0, Holdings({}))


def test_block_ids_are_empty_and_never_shared() -> None:
    ledger = make_ledger([1000])
    first, second = ledger.get_block_ids("r"), ledger.get_blocks("r").get_block_ids(allow_none=True)
    assert first == second == ([],)
    assert first[0] is not second[0]


# Requests that hold less than all that was read.


def test_a_prompt_read_in_one_step_holds_its_bound_until_it_is_reported() -> None:
    ledger = make_ledger([1000], shapes=[(4, 2)], policy="snapkv")
    request = make_request("r", 640, 10)
    assert grow(ledger, request, 640)
    # One layer whole, three at a fifth.
    assert (ledger.books.used, ledger.books.promised) == ([2 * 20 + 3 * 2 * 4], [0])
    assert ledger.must_wait("r")
    account = ledger.accounts["r"]
    assert ledger.requests.control.expected_pages(account, 0, 650) == 8 * (128 + 10 + PAGE // 2) // PAGE
    ledger.verify(0, Holdings({"r": (1, 0, 0)}))  # a step in flight before it
    ledger.on_report(0, "r", report(1, 640, [128] * 8))
    assert ledger.books.used == [8 * 4] and not ledger.must_wait("r")
    assert grow(ledger, request, 1)
    assert ledger.books.used == [8 * 5]


def test_chunks_are_held_with_their_probe_and_promised_the_largest() -> None:
    params = {"take_chunk": 256, "take_probe": 32, "take_warmup_layers": 1, "take_warmup_budget": 160}
    ledger = make_ledger([1000], shapes=[(2, 1)], policy="take", **{"budget": 64, **params})
    request = make_request("r", 700, 10)
    assert ledger.plan(request).prompt.positions == (256, 512, 700)
    peak = (160 + 256 + 32) // PAGE + (64 + 256 + 32) // PAGE
    assert grow(ledger, request, 100)
    assert (ledger.books.used, ledger.books.promised) == ([2 * 4], [peak - 8])
    assert grow(ledger, request, 156)
    assert (ledger.books.used, ledger.books.promised) == ([2 * 9], [peak - 18])
    assert ledger.must_wait("r")
    ledger.on_report(0, "r", report(1, 256, [160, 64]))
    assert (ledger.books.used, ledger.books.promised) == ([5 + 2], [peak - 7])
    assert grow(ledger, request, 256)
    assert (ledger.books.used, ledger.books.promised) == ([14 + 11], [0])
    ledger.on_report(0, "r", report(1, 512, [160, 64]))
    assert grow(ledger, request, 188)
    assert (ledger.books.used, ledger.books.promised) == ([11 + 8], [0])
    ledger.on_report(0, "r", report(1, 700, [64, 64]))
    assert (ledger.books.used, ledger.books.promised) == ([4], [0])


def test_frees_and_who_relies_on_them_travel_together() -> None:
    """The second prompt fits only without the first: the step that admits it is the one that ends the first."""
    options = {"policy": "snapkv", "budget": 1.0, "min_prompt": 0}
    setup = Setup([(2, 2)], [4 * 20], max_model_len=640, prefix_caching=False, options=options)
    simulation = Simulation(setup)
    simulation.add(make_request("first", 500, 100))
    simulation.step()
    simulation.add(make_request("second", 500, 100))
    assert not simulation.step().kv_connector_metadata.admissions
    simulation.abort("first")
    step = simulation.step()
    (admission,) = step.kv_connector_metadata.admissions
    assert admission.request_id == "second" and step.finished_req_ids == {"first"}
