"""What requests that have ended leave uncompressed behind their chain: who goes on with it, and when there is none."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.scheduler.test_branching import OTHER, SAID, chatting, ends, length, turn
from tests.engine.scheduler.test_prefixes import check_end, document, finish, steps
from tests.engine.scheduler.test_shared_prefixes import served
from tests.engine.support.chains import Watched
from tests.engine.support.servers import PAGE, TOKEN, flights, make_request
from vllm_kvevict.engine.scheduler.shared import tails

ANSWER = 70
"""Tokens of an answer."""


def said_until(turns: int) -> list[list[int]]:
    """A conversation up to its last question: a system text, what the user has said, and before that the answers."""
    texts = [OTHER]
    for index in range(turns):
        texts += [SAID[index], [TOKEN] * ANSWER]
    return texts[:-1]


def asked(name: str, texts: list[list[int]], output: int = ANSWER, **fields: Any) -> Any:
    """A request that goes on from what was said, whose turns end with the answers."""
    return turn(name, texts, output, **{"kv_turns": ends(texts)[:-1:2], **fields})


def after_turns(count: int, **changes: Any) -> Watched:
    """A server that was asked for a conversation up to so many turns, one after the other."""
    simulation = Watched(chatting(**changes))
    for turns in range(1, count + 1):
        served(simulation, asked(str(turns), said_until(turns)))
    return simulation


def window_of(simulation: Watched, request: Any) -> int:
    """Tokens before the last end of a turn that a request reads in any case."""
    part = simulation.ledger.plan(request).parts[-1]
    return max(1, part.config.window_for(part.n))


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


# Who reads what.


@flights
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip", "knorm", "lava"])
def test_a_turn_reads_no_more_than_what_chooses_and_its_question(policy: str, flight: dict[str, Any]) -> None:
    """And the account is exact all along."""
    simulation = after_turns(1, options={"policy": policy}, **flight)
    for turns in range(2, 7):
        request = asked(str(turns), said_until(turns))
        window = window_of(simulation, request)
        new = len(SAID[turns - 2]) + ANSWER
        expected = new - whole_pages(min(new - 1, new - window)) + len(SAID[turns - 1])
        assert served(simulation, request) == expected
    assert simulation.workers.taken == 5 and len(simulation.ledger.shared.tails) == 1
    check_end(simulation)


def test_policies_that_sum_over_all_queries_read_the_whole_turn() -> None:
    options = {"policy": "h2o", "policies": ["h2o"]}
    simulation = Watched(chatting(options=options))
    for turns in range(1, 5):
        read = served(simulation, asked(str(turns), said_until(turns)))
    assert read == len(SAID[2]) + ANSWER + len(SAID[3]) and not simulation.workers.taken
    check_end(simulation)


def test_who_tries_again_takes_the_question() -> None:
    """Not its last token, which is read in any case, and of the answer nothing; then that goes on."""
    simulation, texts = after_turns(3), said_until(3)
    cut = simulation.cut
    assert served(simulation, asked("again", texts)) == len(texts[-1]) - whole_pages(len(texts[-1]) - 1)
    assert simulation.cut == cut + 1 and len(simulation.ledger.shared.tails) == 1
    other = [*texts[:-1], texts[-1][:50] + OTHER]
    assert served(simulation, asked("edited", other)) == len(other[-1]) - whole_pages(50)
    check_end(simulation)


def test_of_two_at_once_one_takes_it_and_the_other_waits_for_the_turn() -> None:
    simulation, texts = after_turns(3), said_until(4)
    first, second = asked("a", texts), asked("b", [*texts[:-1], OTHER])
    new, taken = len(SAID[2]) + ANSWER, simulation.workers.taken
    own = new - whole_pages(new - window_of(simulation, first))
    assert served(simulation, first, second) == own + len(texts[-1]) + len(OTHER)
    assert simulation.workers.taken == taken + 1
    check_end(simulation)


@flights
def test_aborted_at_any_step(flight: dict[str, Any]) -> None:
    """What it has read by then is there for who asks again, unless a turn is just being evicted."""
    read = []
    for step in range(1, 30):
        simulation = after_turns(1, max_num_batched_tokens=48, **flight)
        simulation.add(asked("2", said_until(2)))
        steps(simulation, step)
        simulation.abort("c:2")
        finish(simulation)
        read.append(served(simulation, asked("3", said_until(2))))
        check_end(simulation)
    assert read[-1] < len(SAID[1]) <= max(read) < length(said_until(2)) and len(set(read)) > 1


# When there is none.


@pytest.mark.parametrize("what", ["salt", "adapter", "kv_budget", "kv_eviction"])
def test_who_asks_otherwise_finds_none(what: str) -> None:
    otherwise: dict[str, Any] = {"salt": "s", "adapter": 1, "kv_budget": 0.5, "kv_eviction": "snapkv"}
    simulation = after_turns(2, adapters=2)
    texts, taken = said_until(2), simulation.workers.taken
    assert served(simulation, asked("3", texts, **{what: otherwise[what]})) == length(texts)
    assert simulation.workers.taken == taken
    assert served(simulation, asked("4", texts)) < len(texts[-1]) and simulation.workers.taken == taken + 1
    check_end(simulation)


def test_a_reset_leaves_none_of_what_was_read_before() -> None:
    simulation = after_turns(2)
    simulation.add(asked("3", said_until(3)))
    steps(simulation, 4)
    simulation.reset()
    finish(simulation)
    assert not len(simulation.ledger.shared.tails) and simulation.ledger.books.held == [0]
    check_end(simulation)


def test_an_answer_that_is_evicted_leaves_none() -> None:
    """And one that ends before its first eviction does."""
    for output, count in ((300, 0), (80, 1)):
        simulation = Watched(chatting(options={"decode_budget": 64, "decode_interval": 64}))
        simulation.add(asked("1", said_until(2), output))
        finish(simulation)
        assert len(simulation.ledger.shared.tails) == count
        check_end(simulation)


def test_a_document_with_a_question_leaves_none() -> None:
    """It says where the document ends, and not that what follows goes on."""
    simulation = Watched(chatting())
    prompt = document(1, 300)
    for name in ("1", "2"):
        served(simulation, make_request(name, prompt, 90, {"kv_prefix_len": 200}))
        assert not len(simulation.ledger.shared.tails)
    check_end(simulation)


def test_who_goes_before_the_workers_hear_of_it_takes_none() -> None:
    simulation = after_turns(2)
    request = asked("3", said_until(2))
    ledger, held = simulation.ledger, list(simulation.ledger.books.held)
    found = ledger.get_computed_blocks(request)[1]
    ledger.new_step_starts()
    assert ledger.allocate_slots(request, request.num_tokens - found, found) is not None
    assert not len(ledger.shared.tails) and ledger.books.held != held
    request.status = RequestStatus.FINISHED_ABORTED
    ledger.free(request)
    steps(simulation, 1)
    assert not simulation.workers.tails
    check_end(simulation)


# What goes.


def conversations(simulation: Watched, count: int) -> None:
    """So many conversations, each of which leaves a chain of one and a tail."""
    for index in range(count):
        served(simulation, asked(f"chat {index}", [document(100 + index, 100), document(200 + index, 90)]))


def test_all_tails_go_before_any_chain_the_oldest_first() -> None:
    simulation = Watched(chatting(pages=[112], max_model_len=880))
    conversations(simulation, 4)
    kept = [tail.number for tail in simulation.ledger.shared.tails]
    chains = {prefix.number for prefix in simulation.ledger.shared.compressed}
    assert len(kept) == 4
    for tokens in range(100, 900, 100):
        served(simulation, make_request(f"long {tokens}", document(9, tokens), 3, {"kv_eviction": "full"}))
        left = [tail.number for tail in simulation.ledger.shared.tails]
        assert left == kept[len(kept) - len(left) :]
        dropped = {prefix.number for prefix in simulation.dropped}
        assert not dropped or not left
    assert dropped and dropped <= chains
    check_end(simulation)


def test_nobody_waits_or_is_preempted_for_them() -> None:
    """The same load takes as many steps with tails as without."""
    taken = []
    for keep in (True, False):
        simulation = Watched(chatting(pages=[140], max_model_len=1000))
        if not keep:
            simulation.ledger.shared.tails.detach = lambda request, account, untold: None
        conversations(simulation, 5)
        before = simulation.steps
        for index in range(6):
            simulation.add(make_request(f"long {index}", document(index, 300), 90, {"kv_eviction": "full"}))
        finish(simulation)
        taken.append((simulation.steps - before, sum(simulation.preemptions.values())))
        check_end(simulation)
    assert taken[0] == taken[1] and taken[0][1] == 0


def test_no_more_are_kept_than_a_server_may(monkeypatch) -> None:
    monkeypatch.setattr(tails, "MOST_TAILS", 2)
    simulation = Watched(chatting())
    conversations(simulation, 4)
    assert [tail.prefix.tokens for tail in simulation.ledger.shared.tails] == [100] * 2
    check_end(simulation)


def test_a_tail_goes_with_its_chain(monkeypatch) -> None:
    """Where too many chains are cached, and there is memory for all."""
    monkeypatch.setattr("vllm_kvevict.schedules.base.MOST_PREFIXES", 2)
    simulation = Watched(chatting())
    conversations(simulation, 4)
    shared = simulation.ledger.shared
    assert len(shared.compressed) == 2
    assert {tail.prefix for tail in shared.tails} == set(shared.compressed)
    check_end(simulation)
