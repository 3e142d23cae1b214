"""Cached prefixes in the scheduler: who waits for whom, what is shared, what is dropped; and that counts are exact."""

import random
from contextlib import nullcontext
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.cache.writers import WritableCache, plain, writer
from tests.engine.support.chains import check_exact
from tests.engine.support.servers import PAGE, Setup, flights, make_request, options_of
from tests.engine.support.simulation import Simulation
from tests.registering import policy_with_both_defaults
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.messages import StorePrefix
from vllm_kvevict.engine.request_options import RENDERED, plan_for
from vllm_kvevict.engine.scheduler import keys
from vllm_kvevict.engine.scheduler.scheduler import MOST_POSTPONED
from vllm_kvevict.engine.worker.prefixes import CachedPrefixes
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import plan_of
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

VOCAB = 1000


@pytest.fixture
def compressed_only(monkeypatch):
    """Nothing is cached uncompressed, which would shorten what is read where no compressed prefix is found."""
    monkeypatch.setattr("vllm_kvevict.engine.scheduler.shared.uncompressed.MOST_SEGMENTS", 0)


def document(number: int, tokens: int) -> list[int]:
    """The tokens of a document."""
    chooser = random.Random(number)
    return [chooser.randrange(VOCAB) for _ in range(tokens)]


def ask(
    name: str, prefix: list[int], question: int, output: int, salt: str | None = None, **fields: Any
) -> Any:
    """A request with so many tokens behind a prefix; its name is "document: question"."""
    asked = [VOCAB + index for index in range(question)]
    arguments = {"kv_prefix_len": len(prefix), **fields}
    return make_request(name, [*prefix, *asked], output, arguments, salt=salt)


def server(**changes: Any) -> Setup:
    """One rank, unless told otherwise, that caches prefixes."""
    settings = {"shapes": [(2, 2)], "pages": [4000], "max_model_len": 4096, "prefix_caching": True}
    options = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, **changes.pop("options", {})}
    return Setup(**{**settings, **changes, "options": options})


def steps(simulation: Simulation, count: int) -> None:
    for _ in range(count):
        simulation.step()


def finish(simulation: Simulation) -> None:
    """Run to the end; whoever got a token counts its prompt as computed."""
    simulation.run(20_000)


def check_end(simulation: Simulation) -> None:
    """All that is left are cached prefixes; after a reset nothing is."""
    ledger, workers = simulation.ledger, simulation.workers
    assert workers is not None
    nothing = [0] * len(workers.ranks)
    while simulation.scheduler.has_requests():
        simulation.step()
    assert (ledger.books.used, ledger.books.promised) == (nothing, nothing) and ledger.requests.is_empty
    assert not workers.live and ledger.usage == 0
    for rank in range(len(workers.ranks)):
        assert ledger.shared.compressed.held[rank] == workers.cached_pages(rank)
        assert ledger.shared.tails.held[rank] == workers.tail_pages(rank)
        uncompressed = ledger.shared.uncompressed.segments.held[rank]
        assert uncompressed == workers.segment_pages(rank)
        cached = workers.cached_pages(rank) + workers.tail_pages(rank) + uncompressed
        assert workers.held(rank) == cached == ledger.books.cached[rank]
    assert set(workers.tails) == {tail.number for tail in ledger.shared.tails}
    assert set(workers.cached) == {prefix.number for prefix in ledger.shared.compressed}
    assert simulation.reset()
    while simulation.scheduler.has_requests():
        simulation.step()
    assert not workers.cached and not workers.segments and not workers.tails
    assert (
        ledger.books.held == nothing
        and len(ledger.shared.compressed) == len(ledger.shared.uncompressed.segments) == 0
    )


# One document, many questions.


@flights
@pytest.mark.parametrize("chunk", [128, 8192])
def test_sixteen_questions_at_once_read_their_document_once(flight: dict[str, Any], chunk: int) -> None:
    simulation = Simulation(server(max_num_batched_tokens=chunk, **flight))
    for index in range(16):
        simulation.add(ask(f"d:{index}", document(0, 700), 5 + index, 20))
    finish(simulation)
    assert simulation.prefilled == 700 + sum(range(5, 21))
    assert len(simulation.workers.evictions) == 1
    assert set(simulation.outputs.values()) == {20}
    check_end(simulation)


@pytest.mark.usefixtures("compressed_only")
def test_a_hit_borrows_and_leaves_no_trace() -> None:
    simulation = Simulation(server())
    simulation.add(ask("d:0", document(0, 700), 5, 20))
    finish(simulation)
    cached = simulation.ledger.books.held[0]
    assert cached > 0 and simulation.ledger.usage == 0
    simulation.add(ask("d:1", document(0, 700), 5, 20))
    simulation.step()
    (prefix,) = simulation.ledger.shared.compressed
    assert prefix.borrowers == {"d:1"} and prefix.held == [cached]
    # One page of each row at most: the copy of what is not full, or the first page behind what is.
    assert 0 < simulation.ledger.books.used[0] <= 4
    check_exact(simulation)
    finish(simulation)
    assert simulation.ledger.books.held == [cached]
    check_end(simulation)


WRONG = {
    "last token": lambda name, prefix: ask(name, [*prefix[:-1], prefix[-1] + 1], 5, 3),
    "first token": lambda name, prefix: ask(name, [prefix[0] + 1, *prefix[1:]], 5, 3),
    "length": lambda name, prefix: ask(name, prefix[:-1], 5, 3),
    "salt": lambda name, prefix: ask(name, prefix, 5, 3, salt="another"),
    "policy": lambda name, prefix: ask(name, prefix, 5, 3, kv_eviction="snapkv"),
    "budget": lambda name, prefix: ask(name, prefix, 5, 3, kv_budget=0.3),
}


@pytest.mark.usefixtures("compressed_only")
@pytest.mark.parametrize("length", [7, 32, 33, 333])
@pytest.mark.parametrize("what", WRONG)
def test_another_prefix_is_read(what: str, length: int) -> None:
    """Also where it is shorter than a block, so that no hash of vLLM's covers it."""
    simulation = Simulation(server())
    prefix = document(0, length)
    for name, request in (("d:0", ask("d:0", prefix, 5, 3)), ("d:1", WRONG[what]("d:1", prefix))):
        before = simulation.prefilled
        simulation.add(request)
        finish(simulation)
        assert simulation.prefilled - before == request.num_prompt_tokens, name
    before = simulation.prefilled
    simulation.add(ask("d:2", prefix, 9, 3))
    finish(simulation)
    assert simulation.prefilled - before == 9


def test_what_a_lookahead_keeps_of_a_prefix_is_its_own() -> None:
    """The same entries of the same tokens, but chosen by a window of as many as it has of the answer."""
    settings: dict[str, Any] = {"policy": "snapkv", "window": 16}
    ahead = plan_of(EvictionConfig(budget=64, **settings), 300, None, 32)
    plain = plan_of(EvictionConfig(budget=96, **settings), 332)
    request = ask("d:0", document(0, 332), 5, 3)
    found = [keys.prefix_keys(request, plan, PAGE, sha256) for plan in (ahead, plain)]
    assert found[0].keys() == found[1].keys() == {332} and found[0] != found[1]


@pytest.mark.parametrize("kind", ["sha256", "sha256_cbor", "embeddings"])
@pytest.mark.parametrize("length", [7, 32, 33])
def test_what_vllm_hashes_tells_prefixes_apart(kind: str, length: int) -> None:
    """Tokens by any of its functions, or what is given in their place."""
    hashed = sha256 if kind == "embeddings" else get_hash_fn_by_name(kind)
    init_none_hash(hashed)
    hasher = get_request_block_hasher(PAGE, hashed)
    plan = plan_for(options_of(server()), length + 5, {"kv_prefix_len": length})

    def key(*changed: int, **fields: Any) -> Any:
        prompt = torch.arange(8 * (length + 5)).view(-1, 8)
        prompt[list(changed)] += 1
        embeds = prompt.float() if kind == "embeddings" else None
        tokens = prompt[:, 0].tolist() if embeds is None else None
        params = SamplingParams(max_tokens=1)
        request = Request("r", tokens, params, None, prompt_embeds=embeds, block_hasher=hasher, **fields)
        return keys.prefix_keys(request, plan, PAGE, hashed)[length]

    assert key() == key(length, length + 4)
    assert len({key(), key(0), key(length - 1), key(cache_salt="s")}) == 4


def test_requests_share_a_prefix_if_their_parameters_are_equal() -> None:
    """However they are written, and whoever says so; the server's kernel is 31."""
    simulation, numbers = Simulation(server(options={"kernel": 31})), count()

    def key(**fields: Any) -> Any:
        request = ask(f"d:{next(numbers)}", document(0, 300), 5, 3, **fields)
        return simulation.ledger.requests.keys(request)[300]

    one = key(kv_params="alpha=0.3,window=16")
    assert one is not None
    assert one == key(kv_params="window=16.0,alpha=0.30") == key(kv_params="kernel=31,window=16,alpha=0.3")
    others = [key(), *(key(kv_params=text) for text in ("alpha=0.3", "alpha=0.3,window=16,kernel=7"))]
    assert one not in others and len(set(others)) == 3


def test_a_part_is_another_prefix_where_its_window_is_smaller() -> None:
    """A part of 400 tokens keeps 80, of which its window is 20; and what earlier parts there are matters."""
    simulation, tokens = Simulation(server(options={"min_turn": 1})), document(0, 410)

    def key(name: str, fields: dict[str, Any]) -> Any:
        return simulation.ledger.requests.keys(make_request(name, tokens, 3, fields))[400]

    as_prefix, as_part = {"kv_prefix_len": 400}, {"kv_turns": [400]}
    assert key("1", as_part) not in (None, key("2", as_prefix))
    narrow = {"kv_params": "window=20"}
    assert key("3", as_part | narrow) == key("4", as_prefix | narrow)
    others = [key("5", {"kv_turns": [200, 400]} | narrow), key("6", {"kv_turns": [100, 400]} | narrow)]
    assert len({key("7", as_part | narrow), *others}) == 3


def test_other_defaults_are_another_prefix(monkeypatch) -> None:
    """Of equal parameters, whoever says so, it is the same one."""
    policy = policy_with_both_defaults(monkeypatch)
    keys = []
    for options in ({}, {"defaults": "paper"}, {"kernel": 7, "rows": "mean"}):
        simulation = Simulation(server(options={"policy": policy, **options}))
        request = ask("d:0", document(0, 300), 5, 3)
        keys.append(simulation.ledger.requests.keys(request)[300])
    assert keys[0] != keys[1] == keys[2]


ROWS = [[1, 2, 3], [4, 5], [6]]
OTHER_ROWS = {
    "first": [[1, 2, 4], [4, 5], [6]],
    "before": [[1, 2, 3], [4], [6]],
    "after": [[1, 2, 3], [4, 5], []],
    "the same in other places": [[1, 2, 3], [4], [5, 6]],
    "none": [[], [], []],
    "no field": None,
}
"""What the model may be asked when it repeats a prefix."""


def repeated(rows: Any) -> dict[str, Any]:
    """The fields of a request that is repeated with them."""
    return {} if rows is None else {RENDERED: {"repeat": asdict(RepeatPrompts(*map(tuple, rows)))}}


def prefix_with(rows: Any, policy: str = "kvzip") -> Any:
    """The key of a prefix that is always the same, repeated with other rows."""
    simulation = Simulation(server(options={"policy": policy}))
    request = ask("d:0", document(0, 300), 5, 3, **repeated(rows))
    return simulation.ledger.requests.keys(request)[300]


@pytest.mark.parametrize("what", OTHER_ROWS)
def test_what_is_repeated_in_other_words_is_another_prefix(what: str) -> None:
    assert prefix_with(ROWS) == prefix_with(ROWS) and hash(prefix_with(ROWS)) == hash(prefix_with(ROWS))
    assert prefix_with(ROWS) != prefix_with(OTHER_ROWS[what])
    # Words that nobody uses say nothing.
    assert prefix_with(ROWS, "ada-snapkv") == prefix_with(OTHER_ROWS[what], "ada-snapkv")


@pytest.mark.usefixtures("compressed_only")
@pytest.mark.parametrize("fields", [{"kv_eviction": "full"}, {"kv_budget": 1.0}, {"kv_prefix_len": 305}])
def test_what_is_kept_whole_or_evicted_at_its_end_is_not_cached(fields: dict[str, Any]) -> None:
    simulation = Simulation(server())
    for index in range(2):
        simulation.add(ask(f"d:{index}", document(0, 300), 5, 3, **fields))
    finish(simulation)
    assert simulation.prefilled == 2 * 305 and not simulation.ledger.shared.compressed


def test_prompt_logprobs_are_computed_and_not_waited_for() -> None:
    simulation = Simulation(server())
    requests = [ask(f"d:{index}", document(0, 300), 5, 3) for index in range(3)]
    requests[1].skip_reading_prefix_cache = True
    for request in requests:
        simulation.add(request)
    simulation.step()
    assert [request.num_computed_tokens > 0 for request in requests] == [True, True, False]
    finish(simulation)
    assert simulation.prefilled == 2 * 305 + 5
    check_end(simulation)


# Pools that are too small.


@pytest.mark.parametrize("pages", range(120, 130))
def test_a_sole_donor_has_the_room_that_its_prefix_takes(pages: int) -> None:
    """What is kept, and the longest answer, fill the pool: copies beside them would not fit."""
    results = []
    for caches in (True, False):
        settings = {"max_model_len": 960, "options": {"budget": 0.95}, "prefix_caching": caches}
        simulation = Simulation(server(pages=[pages], **settings))
        for index in range(3):
            simulation.add(ask(f"d{index}:0", document(index, 640), 64, 256))
            finish(simulation)
        results.append((simulation.outputs, simulation.preemptions, simulation.steps))
        check_end(simulation)
    assert results[0] == results[1]
    assert set(results[0][0].values()) == {256} and set(results[0][1].values()) == {0}


def test_nobody_is_preempted_for_copies_that_no_request_uses() -> None:
    """Of a short prefix no page is full, so that two requests share nothing and the cached one is only for others."""
    compared = 0
    for pages in range(34, 90):
        results = []
        for caches in (True, False):
            settings = {"max_model_len": 260, "options": {"decode_reserve": 8}, "prefix_caching": caches}
            simulation = Simulation(server(pages=[pages], **settings))
            for index in range(2):
                simulation.add(ask(f"d:{index}", document(0, 64), 8, 180))
            finish(simulation)
            results.append(sum(simulation.preemptions.values()))
            check_end(simulation)
        compared += results[1] > 0
        assert results[0] <= results[1], pages
    assert compared > 3


@pytest.mark.usefixtures("compressed_only")
def test_what_several_borrow_is_counted_once_and_stays() -> None:
    """A prefix of 40 pages, and 36 of each answer: 132 hold it with two answers, and without it three."""
    settings = {"max_model_len": 960, "options": {"policy": "snapkv", "budget": 0.5}}
    simulation = Simulation(server(pages=[132], **settings))
    simulation.add(ask("d:0", document(0, 640), 1, 1))
    finish(simulation)
    for index in range(1, 4):
        simulation.add(ask(f"d:{index}", document(0, 640), 8, 256))
    simulation.most_running = 0
    finish(simulation)
    assert simulation.most_running == 2 and set(simulation.preemptions.values()) == {0}
    assert simulation.workers.hits == 3 and not simulation.workers.dropped
    check_end(simulation)


def test_nothing_is_dropped_for_a_request_that_has_to_wait_all_the_same() -> None:
    """One begins with a prefix, so that this has to stay for the step; without it there is no room for the next."""
    waited = 0
    for pages in range(140, 152):
        settings = {"max_model_len": 960, "max_num_batched_tokens": 512, "options": {"budget": 0.5}}
        simulation = Simulation(server(pages=[pages], **settings))
        for number in range(2):
            simulation.add(ask(f"d{number}:0", document(number, 320), 1, 1))
            finish(simulation)
        simulation.add(ask("d0:1", document(0, 320), 8, 9))
        simulation.add(ask("d2:0", document(2, 940), 10, 9))
        simulation.step()
        waits = len(simulation.scheduler.running) == 1
        waited += waits
        assert not (waits and simulation.ledger.outbox.has_drops), pages
        assert not (waits and simulation.workers.dropped), pages
        finish(simulation)
        check_end(simulation)
    assert 0 < waited < 12


def test_nobody_pauses_for_a_prompt_that_waits_for_its_prefix() -> None:
    """Who reads the prefix would pause as well, and neither would ever go on."""
    simulation = Simulation(server(max_num_batched_tokens=100))
    for index in range(2):
        simulation.add(ask(f"d:{index}", document(0, 700), 10, 6))
    steps(simulation, 2)
    simulation.scheduler._postponed["d:1"] = MOST_POSTPONED
    finish(simulation)
    assert set(simulation.outputs.values()) == {6} and simulation.prefilled == 700 + 2 * 10
    check_end(simulation)


@pytest.mark.usefixtures("compressed_only")
def test_the_least_recently_used_goes_first() -> None:
    """Of four documents three fit; who asks again is not the one to go."""
    simulation = Simulation(server(pages=[180], max_model_len=1024, options={"budget": 0.5}))
    order = [0, 1, 2, 0, 3, 0, 1]
    computed = []
    for index, number in enumerate(order):
        before = simulation.prefilled
        simulation.add(ask(f"d{number}:{index}", document(number, 640), 16, 4))
        finish(simulation)
        computed.append(simulation.prefilled - before > 16)
    assert computed == [True, True, True, False, True, False, True]
    assert simulation.workers.dropped == [2, 3]
    check_end(simulation)


# Workers.


def small_cache(pages: int, num_layers: int) -> PagedKVCache:
    sizes = {"num_layers": num_layers, "num_kv_heads": 1, "page_size": PAGE, "max_requests": 4}
    return WritableCache(torch.randn(pages, 2 * PAGE * 8), **sizes, write=writer(PAGE, plain, plain))


def test_a_worker_notices_that_somebody_writes_to_a_prefix() -> None:
    cache = small_cache(pages=16, num_layers=2)
    for check in (True, False):
        prefixes, donor = CachedPrefixes(cache, check), cache.open()
        cache.extend([donor], [PAGE + 1])
        prefixes.expect({"d:0": StorePrefix(1)})
        prefixes.store("d:0", donor)
        prefixes.store("d:0", donor)  # once
        prefixes.verify()
        slot = prefixes.open(
            Admission("d:1", 1, plan_of(EvictionConfig("snapkv", budget=64), 100), prefixes=(1,))
        )
        assert prefixes.holdings() == {1: 4}
        cache.storage[cache.loans[1].pages[0].item(), 3] += 1
        with pytest.raises(RuntimeError, match="written to compressed prefix 1") if check else nullcontext():
            prefixes.verify()
        cache.close([slot, donor])
        cache.loans.drop(1)


def many_prefixes(count: int, pages: int) -> CachedPrefixes:
    """So many uncompressed prefixes of so many pages each, which a worker in check mode has made in one step."""
    cache = small_cache(count * pages, num_layers=1)
    prefixes, donor = CachedPrefixes(cache, check=True), cache.open()
    cache.extend([donor], [count * pages * PAGE])
    prefixes.freeze(donor, [(number, pages) for number in range(count)])
    prefixes.verify()
    return prefixes


def test_checksums_of_many_pages_are_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step compares few of them, and a round all."""
    prefixes = many_prefixes(200, 40)
    summed: list[int] = []
    checksum = prefixes.loans.checksum
    monkeypatch.setattr(prefixes.loans, "checksum", lambda number: summed.append(number) or checksum(number))
    for _ in range(100):
        before = len(summed)
        prefixes.verify()
        assert len(summed) - before == 2
    assert sorted(summed) == list(range(200))


@pytest.mark.parametrize("at_its_end", [True, False])
def test_a_write_to_one_of_many_prefixes_is_noticed(at_its_end: bool) -> None:
    """Before it is dropped, and within a round."""
    prefixes = many_prefixes(200, 40)
    prefixes.cache.storage[40 * 77, 3] += 1
    with pytest.raises(RuntimeError, match="written to compressed prefix 77"):
        if at_its_end:
            prefixes.cache.close([0])
            prefixes.drop([77])
        for _ in range(100):
            prefixes.verify()


@pytest.mark.parametrize("what, name", [("cached", "compressed prefix"), ("segments", "segment")])
def test_what_a_rank_has_lost_is_noticed(what: str, name: str) -> None:
    simulation = Simulation(server())
    simulation.add(ask("d:0", document(0, 300), 10, 30))
    steps(simulation, 5)
    number, _ = getattr(simulation.workers, what).popitem()
    with pytest.raises(RuntimeError, match=f"rank 0 holds 0 pages of {name} {number}, the ledger expects"):
        steps(simulation, 3)
