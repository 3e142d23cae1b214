"""What all names of `micro` share, attention, and parts of steps and accounts; no engine is started."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.platforms import current_platform

from benchmarks.harness.measure import Estimate
from benchmarks.harness.sides import Outcome
from benchmarks.micro import attention, breakdown, drafts, quantised
from benchmarks.micro.breakdown import REST, Stopwatch
from benchmarks.micro.decode import check_steps
from benchmarks.micro.holding import EIGHT_BITS, KERNEL, LAYERS, Holding
from benchmarks.micro.ledger import PROMPT, decode_round, make_ledger, make_requests, make_stock
from benchmarks.micro.loop import Cell, in_turns
from benchmarks.micro.prompts import Prompt


def test_sides_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    found = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}, 2)
    assert "".join(calls) == "cba" + "abc" + "cba"
    assert found == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}


def test_ratios_are_paired():
    pairs = [((2.0, 6.0), (1.0, 2.0)), ((30.0, 6.0), (10.0, 2.0))]
    cell = Cell({"context": 1}, pairs)
    assert cell.ratio(0) == Estimate(2.5, 2.0, 3.0) and cell.ratio(1).median == 3.0
    assert Cell({}, pairs, over=(1, 0)).ratio(1).median == pytest.approx(1 / 3)
    assert cell.summary().keys() == {"context", "pairs", "wall", "cpu"}


# Attention.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_ways_to_attend_compute_the_same(dtype):
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        cells = attention.compare(2, 64, 0.5, 2, dtype)
        holding = Holding(2, 64, 0.5, KERNEL, 1, dtype)
        holding.by_kernel()  # stores the new entries as well, so that the op finds them
        ours = holding.output.clone()
        holding.by_op()
        eight = Holding(2, 64, 1.0, EIGHT_BITS, 1, dtype)
        eight.by_kernel()
        stored = (eight.cache.read(name, 1, LAYERS - 1, 65) for name in ("key", "value"))
        wanted = scaled_dot_product_attention(eight.query[1].unsqueeze(1), *stored, enable_gqa=True)[:, 0]
        prompt = Prompt(300, getattr(torch, dtype))
        prompt.by_op()
        by_op = prompt.output.clone()
        prompt.output.zero_()
        prompt.by_kernel()
    assert [(cell.of["attention"], len(cell.pairs)) for cell in cells] == [(way, 2) for way in attention.WAYS]
    torch.testing.assert_close(eight.output[1], wanted, atol=2e-2, rtol=2e-2)
    assert (eight.output[0] - wanted).abs().max() > 0.1  # the control: another request's
    torch.testing.assert_close(holding.output, ours, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(prompt.output, by_op, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("worst, met", [(1.5, True), (1.3, False)])
def test_8_bits_are_judged_by_the_worst_size(worst, met, at_level):
    at_level("avx2")
    seconds = (9.0, 3.0, 1.0), (9.0, worst, 1.0)  # of the op, our kernel, and that with 8 bits
    cells = [Cell({}, [((9.0, 9.0), (wall, wall))] * 3) for size in seconds for wall in size]
    (target,) = attention.targets(cells, "float32")
    assert (target.value.median, target.met) == (worst, met) and not attention.targets(cells, "converted")


def test_both_kinds_of_steps_are_held_against_the_models_dtype():
    def runs(prefill, decode):
        return [Outcome(9.0, 9.0, 1, [(prefill, 5, 1), (decode, 0, 1)])] * 3

    for eight, met in ((runs(1.0, 1.0), [True, True]), (runs(1.1, 1.1), [False, False])):
        assert [target.met for target in quantised.summary([runs(1.0, 1.0), eight]).targets] == met


# Parts of steps, and accounts.


def test_the_time_of_what_a_function_calls_is_not_its_own(monkeypatch):
    now = SimpleNamespace(time=100.0)  # moves only when it is told to
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: now.time)

    def spend(seconds):
        now.time += seconds

    stopwatch, work = Stopwatch(), SimpleNamespace()
    work.inner = lambda seconds: spend(seconds) or seconds
    work.outer = lambda: spend(1) or work.inner(2) + work.inner(4)
    stopwatch.watch(work, "inner", "inside")
    stopwatch.watch(work, "outer", "outside")
    assert stopwatch.run(lambda: spend(16) or work.outer()) == {REST: 16, "outside": 1, "inside": 6}
    assert stopwatch.run(lambda: None) == {REST: 0}


@pytest.mark.parametrize("seen", [[(0.1, 7, 4)], [(0.1, 0, 3)], [(0.1, 0, 4)] * 2, []])
def test_timed_steps_must_be_pure_decode(seen):
    check_steps([(0.1, 0, 4)], steps=1, batch=4)
    with pytest.raises(RuntimeError, match="pure decode"):
        check_steps(seen, steps=1, batch=4)


def test_both_managers_schedule_the_same_steps():
    requests = [make_requests(2, last=PROMPT) for _ in range(2)]
    ledger = make_ledger(requests[0][:-1], 1)
    stock = make_stock(make_requests(2, last=0)[:-1])
    assert decode_round(ledger, requests[0][:-1], requests[0][-1]) > 0
    assert stock.block_pool.get_num_free_blocks() > 0


def test_what_a_breakdown_watches_is_there():
    assert all(callable(getattr(owner, name)) for owner, name, _ in breakdown.of_eviction())


@pytest.mark.parametrize("accepted, met", [(66.0, True), (64.0, False)])
def test_accepted_tokens_are_held_against_those_of_the_same_round_at_budget_1(accepted, met):
    rounds = {
        (policy, budget): [(accepted if budget == 0.2 else 100.0, 100.0), (30.0, 60.0), (20.0, 40.0)]
        for policy, budget in itertools.product(drafts.SCOPES, drafts.BUDGETS)
    }
    found = drafts.summary(rounds)
    assert [target.met for target in found.targets] == [met, met]
    assert [cell["over budget 1"].low for cell in found.results["cells"]] == [1, 1, accepted / 100, 1] * 2
    assert not drafts.summary({kind: counts[:2] for kind, counts in rounds.items()}).targets
