"""Admission and preemption, with vLLM's real scheduler: nothing hangs, nothing overflows, counts are exact."""

import dataclasses
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.support.servers import PAGE, Setup, capacities, flights, make_request, make_scheduler
from tests.engine.support.simulation import Simulation
from vllm_kvevict import __version__
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.messages import Handshake
from vllm_kvevict.engine.scheduler.scheduler import MOST_POSTPONED
from vllm_kvevict.policies import cuts
from vllm_kvevict.schedules.reports import ExtraTokens, Report

ROWS = 32


def server(full_sequences: float = 4.0, **changes: Any) -> Setup:
    """One rank of 8 layers x 4 KV heads that holds so many whole sequences of 2048 + 256 tokens."""
    pages = int(full_sequences * ROWS * 2304 / PAGE)
    return Setup(**{"shapes": [(8, 4)], "pages": [pages], "max_model_len": 2304, **changes})


# The load that admission was designed for: 24 requests of 2048 tokens in and 256 out.


def reference(setup: Setup) -> Simulation:
    simulation = Simulation(setup, greeds=("random",))
    for index in range(24):
        simulation.add(make_request(f"r{index}", 2048, 256))
    simulation.run(20_000)
    assert set(simulation.outputs.values()) == {256}
    return simulation


@flights
@pytest.mark.parametrize("chunk", [512, 2048, 8192])
@pytest.mark.parametrize("full_sequences", [4.0, 4 * 2048 / 2304], ids=["4 sequences", "4 prompts"])
def test_three_times_as_many_run_at_once(full_sequences: float, chunk: int, flight: dict[str, Any]) -> None:
    simulation = reference(server(full_sequences, max_num_batched_tokens=chunk, **flight))
    assert simulation.most_running >= 12
    assert sum(simulation.preemptions.values()) <= 2


@pytest.mark.parametrize("options", [{"policy": "full"}, {"policy": "ada-snapkv", "budget": 1.0}])
def test_nothing_to_evict_runs_four(options: dict[str, Any]) -> None:
    simulation = reference(server(options=options))
    assert simulation.most_running == 4
    assert not simulation.workers.evictions


def test_half_the_ranks_memory_is_what_counts() -> None:
    setup = server(shapes=[(8, 4), (8, 4)], pages=[4 * 72 * ROWS, 2 * 72 * ROWS])
    assert reference(setup).most_running <= 7


# Reports.


def test_report_of_an_older_admission_is_dropped() -> None:
    simulation = Simulation(server(depth=3))
    simulation.add(make_request("r", 2048, 16))
    simulation.step()
    simulation.scheduler.reset_prefix_cache(
        reset_running_requests=True
    )  # preempts it, its eviction in flight
    assert not simulation.ledger.accounts
    simulation.step()
    account = simulation.ledger.accounts["r"]
    assert account.epoch == 2
    simulation.deliver()
    assert simulation.ledger.accounts["r"] is account
    assert account.pending and account.held == account.terms.peak == [641]
    simulation.deliver()
    assert not account.pending and account.held[0] < ROWS * 64 / 4
    simulation.run(100)
    assert simulation.outputs["r"] == 16
    assert simulation.workers.evictions == [("r", 1, 2048), ("r", 2, 2048)]


@pytest.mark.parametrize("leaves", ["reported", "aborted", "preempted"])
def test_frees_are_pending_only_while_an_eviction_is_unreported(leaves: str) -> None:
    simulation = Simulation(server(depth=3, max_num_batched_tokens=1024))
    connector = simulation.scheduler.connector
    simulation.add(make_request("r", 2048, 16))
    assert not connector.has_pending_block_frees()
    simulation.step()
    assert not connector.has_pending_block_frees()  # the first chunk evicts nothing
    simulation.step()
    assert connector.has_pending_block_frees()
    simulation.deliver()
    assert connector.has_pending_block_frees()
    if leaves == "reported":
        simulation.deliver()
    elif leaves == "aborted":
        simulation.abort("r")
    else:
        simulation.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not connector.has_pending_block_frees()
    simulation.run(100)


def leave(simulation: Simulation, name: str, how: str) -> None:
    """Let a request be aborted, or preempted as all others are."""
    if how == "aborted":
        simulation.abort(name)
    else:
        simulation.scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("policy", ["lava", "layer-defensivekv"])
@pytest.mark.parametrize("depth, asynchronous", [(1, False), (2, True), (2, False)])
@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_a_request_that_leaves_while_it_is_decided_about(
    leaves: str, depth: int, asynchronous: bool, policy: str, monkeypatch
) -> None:
    """At any step, also between two rounds: nothing is decided for it, and nothing is left of it."""
    monkeypatch.setattr(cuts, "MOST_KEYS", 16)
    for steps in range(1, 9):
        simulation = Simulation(
            server(
                shapes=[(4, 4), (4, 4)],
                pages=[9216, 9216],
                depth=depth,
                asynchronous=asynchronous,
                pipeline=True,
                options={"policy": policy, "budget": 0.2},
            )
        )
        simulation.add(make_request("r2", 2048, 16))
        for _ in range(steps):
            simulation.step()
        ledger, evictions = simulation.ledger, simulation.workers.evictions
        pending, is_answered = ledger.accounts["r2"].pending, "r2" in ledger.outbox.answered
        is_decided = not (pending and pending.is_undecided) and not is_answered
        leave(simulation, "r2", leaves)
        simulation.run(100)
        assert ("r2", 1, 2048) not in evictions or is_decided
        assert not ledger.outbox.answered and not ledger.accounts and ledger.books.used == [0, 0]
        assert [tokens for _, _, tokens in evictions] == [2048] * len(evictions)
        if leaves == "preempted":
            assert simulation.outputs["r2"] == 16 and evictions[-1][1] == 2
        if policy == "layer-defensivekv" and steps > 4:
            assert simulation.workers.most_rounds >= 3


@pytest.mark.parametrize("change", ["pages", "residues"])
def test_a_wrong_report_is_found(change: str) -> None:
    """The check can fail: at once for a wrong count, within a page of tokens for wrong last pages."""

    def falsify(report: Report) -> Report:
        if change == "pages":
            return dataclasses.replace(report, pages=report.pages + 1)
        # As if each row had one entry more, so that the ledger counts a page too early.
        return dataclasses.replace(report, residues=[report.residues[-1], *report.residues[:-1]])

    simulation = Simulation(server(), greeds=("random",))
    simulation.workers.tamper = falsify
    simulation.add(make_request("r", 2048, 64))
    with pytest.raises(RuntimeError, match="kv eviction check: rank 0 holds"):
        simulation.run(PAGE + 2)


# Eviction positions.


@pytest.mark.parametrize("extra_args, position", [({}, 2000), ({"kv_prefix_len": 700}, 700)])
def test_replay_is_cut_at_the_same_position(extra_args: dict[str, Any], position: int) -> None:
    simulation = Simulation(server(max_num_batched_tokens=8192))
    simulation.add(make_request("r", 2000, 64, extra_args))
    for _ in range(20):
        simulation.step()
    simulation.scheduler.reset_prefix_cache(reset_running_requests=True)
    known = 2000 + simulation.outputs["r"]
    assert simulation.step().num_scheduled_tokens == {"r": position}
    assert simulation.step().num_scheduled_tokens == {"r": known - position}
    simulation.run(100)
    assert simulation.workers.evictions == [("r", 1, position), ("r", 2, position)]
    assert simulation.outputs["r"] == 64


def test_pool_too_small_for_one_sequence_is_refused() -> None:
    make_scheduler(server(full_sequences=1))
    with pytest.raises(
        ValueError, match=r"^a prompt of --max-model-len 2304 tokens does not fit .* 2303 pages: lower"
    ):
        make_scheduler(server(pages=[2303]))


def test_another_version_on_a_rank_is_refused() -> None:
    setup = server()
    scheduler, (capacity,) = make_scheduler(setup), capacities(setup)
    with pytest.raises(KVEvictionError, match=r"rank 0 has vllm-kvevict 0\.0\.9, .* every machine"):
        scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(0, capacity, "0.0.9")})


def test_a_second_handshake_changes_nothing() -> None:
    """vLLM may collect them again while requests run, as it does when it wakes a server."""
    setup = server()
    simulation = Simulation(setup)
    simulation.add(make_request("r", 2048, 16))
    simulation.step()
    used = list(simulation.ledger.books.used)
    shakes = {(rank, 0): Handshake(rank, x, __version__) for rank, x in enumerate(capacities(setup))}
    simulation.scheduler.connector.set_xfer_handshake_metadata_pp_aware(shakes)
    assert simulation.ledger.books.used == used != [0]
    simulation.run(100)
    assert simulation.outputs == {"r": 16} and simulation.ledger.books.used == [0]


# Prompts that are read in one step.


def test_prompts_are_postponed_rather_than_cut() -> None:
    """Two of 1500 tokens do not fit a step of 2048: the second is read in the next, whole."""
    simulation = Simulation(server())
    for name in "ab":
        simulation.add(make_request(name, 1500, 8))
    assert simulation.step().num_scheduled_tokens == {"a": 1500}
    assert simulation.step().num_scheduled_tokens == {"a": 1, "b": 1500}
    simulation.run(20)
    assert simulation.workers.peak_pages[0] < ROWS * 47


def test_prompts_that_fit_in_no_other_way_wait_for_a_step_of_their_own() -> None:
    """A pool of half a prompt: it runs once the decodes before it have ended, and nobody overtakes it."""
    simulation = Simulation(
        server(
            shapes=[(16, 2)],
            pages=[ROWS * 32],
            max_model_len=2048,
            options={"policy": "snapkv", "budget": 0.1},
        )
    )
    for name in "abcd":
        simulation.add(make_request(name, 300, 40))
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("long", 2046, 2))
    simulation.add(make_request("short", 300, 8))
    order = []
    while simulation.scheduler.has_requests():
        scheduled = simulation.step().num_scheduled_tokens
        order += [name for name, count in scheduled.items() if count > 1]
        assert scheduled.get("long", 2046) in (1, 2046)
    assert order == ["long", "short"]


ANSWERING = {"a": 1, "b": 1, "c": 1}


def behind_answers(seats: int = 64) -> Simulation:
    """A prompt has waited for a step of its own until the others would pause for it; one more waits behind."""
    options = {"policy": "snapkv", "budget": 0.1}
    setup = server(
        shapes=[(16, 2)], pages=[ROWS * 32], max_model_len=2048, max_num_seqs=seats, options=options
    )
    simulation = Simulation(setup)
    for name in ANSWERING:
        simulation.add(make_request(name, 300, 100))
    for _ in range(3):
        simulation.step()
    simulation.add(make_request("long", 2046, 2))
    simulation.add(make_request("short", 300, 8))
    for _ in range(MOST_POSTPONED):
        assert simulation.step().num_scheduled_tokens == ANSWERING
    return simulation


def test_nobody_pauses_for_a_prompt_without_a_seat() -> None:
    simulation = behind_answers(seats=3)
    for _ in range(20):
        assert simulation.step().num_scheduled_tokens == ANSWERING
    simulation.run(300)
    assert simulation.outputs == {"a": 100, "b": 100, "c": 100, "long": 2, "short": 8}


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_nobody_pauses_for_a_prompt_while_the_server_is_paused(state: PauseState) -> None:
    """Requests that run go on to their end, if they may."""
    simulation = behind_answers()
    simulation.scheduler.set_pause_state(state)
    for _ in range(20):
        running = ANSWERING if state == PauseState.PAUSED_NEW else {}
        assert simulation.step().num_scheduled_tokens == running
    simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert simulation.step().num_scheduled_tokens == {"long": 2046}
    simulation.run(300)


def computed_beside(simulation: Simulation, most: int = 10**6) -> list[ExtraTokens]:
    """Run to the end: what was computed beside prompts and answers, in steps of so many tokens at most."""
    found = []
    while simulation.scheduler.has_requests():
        output = simulation.step()
        assert output.total_num_scheduled_tokens <= most
        extra = output.kv_connector_metadata.extra
        found += [extra] if extra else []
    while simulation.in_flight:
        simulation.deliver()
    return found


# take.


def taking(**changes: Any) -> Setup:
    """A server that reads prompts in chunks of 512 tokens."""
    params = {"take_chunk": 512, "take_probe": 32, "take_warmup_budget": 300, "take_warmup_layers": 2}
    options = {"policy": "take", "budget": 200, "min_prompt": 0, **params}
    return server(**{"options": options, **changes})


@flights
@pytest.mark.parametrize("chunk", [100, 512, 700, 8192])
def test_chunks_end_in_steps_of_their_own_with_a_probe(chunk: int, flight: dict[str, Any]) -> None:
    simulation = Simulation(taking(max_num_batched_tokens=chunk, **flight))
    for index in range(6):
        simulation.add(make_request(f"r{index}", 1900, 20))
    probes = computed_beside(simulation, chunk + 32)
    assert sorted(probe.request_id for probe in probes) == sorted(3 * [f"r{index}" for index in range(6)])
    positions = {position for _, _, position in simulation.workers.evictions}
    assert positions == {512, 1024, 1536, 1900}
    assert set(simulation.outputs.values()) == {20}
    assert simulation.ledger.books.used == simulation.ledger.books.promised == [0]


# kvzip.


def repeating(**changes: Any) -> Setup:
    """A server that repeats prompts in chunks of 128 tokens."""
    options = {"policy": "kvzip", "budget": 200, "min_prompt": 0, "kvzip_chunk": 128, "policies": "all"}
    return server(**{"options": {**options, **changes.pop("options", {})}, **changes})


@flights
@pytest.mark.parametrize("sees", ["all", "chunk"])
def test_prompts_are_repeated_chunk_by_chunk_before_they_are_evicted(
    sees: str, flight: dict[str, Any]
) -> None:
    simulation = Simulation(repeating(options={"kvzip_sees": sees}, max_num_batched_tokens=300, **flight))
    for index in range(6):
        simulation.add(make_request(f"r{index}", 500, 20))
    chunks: dict[str, list[tuple[int, int]]] = {}
    for extra in computed_beside(simulation, 300 + 128 + 8):
        chunks.setdefault(extra.request_id, []).append((extra.start, extra.stop))
    assert chunks == {f"r{index}": [(0, 128), (128, 256), (256, 384), (384, 500)] for index in range(6)}
    assert sorted(simulation.workers.evictions) == [(f"r{index}", 1, 500) for index in range(6)]
    assert set(simulation.outputs.values()) == {20}
    assert simulation.ledger.books.used == simulation.ledger.books.promised == [0]
    assert not simulation.ledger.reserve.spans


def test_chunks_shrink_where_a_request_has_no_room_for_more() -> None:
    """Rows stand behind the prompt, and no request may have more tokens than --max-model-len."""
    simulation = Simulation(repeating(max_model_len=2304))
    simulation.add(make_request("r", 2304 - 128 - 1 - 100, 4))
    sizes = [extra.stop - extra.start for extra in computed_beside(simulation)]
    assert set(sizes[:-1]) == {100} and sum(sizes) == 2075
    assert simulation.outputs == {"r": 4}


def test_nothing_is_repeated_while_all_are_paused() -> None:
    """vLLM pauses a server to change its weights or to let it sleep, with its requests in place."""
    simulation = Simulation(repeating())
    simulation.add(make_request("r", 500, 8))
    simulation.step()
    assert simulation.step().kv_connector_metadata.extra
    simulation.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(3):
        output = simulation.step()
        assert not output.kv_connector_metadata.extra and not output.total_num_scheduled_tokens
    simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
    simulation.run(60)
    assert simulation.workers.evictions == [("r", 1, 500)] and simulation.outputs == {"r": 8}


def test_probes_and_repeats_take_turns() -> None:
    """Both kinds of requests go on while there are both: a step has room for one of them."""
    options = {"policy": "take", "budget": 200, "take_chunk": 256, "take_probe": 16, "take_warmup_layers": 1}
    simulation = Simulation(server(8.0, options={**options, "min_prompt": 0, "policies": "all"}))
    for index in range(4):
        simulation.add(make_request(f"p{index}", 1500, 4))
        simulation.add(make_request(f"r{index}", 1500, 4, {"kv_eviction": "kvzip"}))
    kinds = "".join(extra.request_id[0] for extra in computed_beside(simulation))
    assert kinds.count("p") == 4 * 5 and kinds.count("r") == 4 * 3
    first, last = kinds.index("r"), kinds.rindex("r")
    assert "pp" not in kinds[first:last] and "rr" not in kinds[first:last]
