"""What a cache alone could find: tiny cases by hand, vLLM's own block manager, and a run on record."""

import json
from dataclasses import replace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benchmarks.harness.chats import SCENARIOS, Scenario
from benchmarks.harness.measure import RESULTS
from benchmarks.harness.scenarios import BLOCK, STOCK
from benchmarks.harness.simulated_chats import CHAINS, PERFECT, TAILS, Blocks, Chains, found_shares

AGENTS = SCENARIOS["agents"]


def scenario(chats: int = 1, turns: int = 2, pool: int = 1, budget: float = 0.25, **sizes) -> Scenario:
    """Chats in turns; parts of 256 tokens and 320, of 8.5 and 11 pages in each row before they are evicted."""
    sizes = {"system_len": 256, "turn_len": 256, "answer_len": 64} | sizes
    return Scenario("", chats, turns, pool=pool, in_turns=True, budget=budget, **sizes)


def asked(cache: Blocks | Chains, load: Scenario) -> dict[tuple[int, int], int]:
    """What each turn of each chat finds."""
    return {(chat, turn): cache.ask(chat, turn) for chat, turn in load.order()}


# Stock.


def test_blocks_of_chats_that_take_turns():
    """Two chats have two blocks each, one of which is not full. The first goes on with its full one, and takes the
    other three places."""
    load = scenario(chats=2, system_len=0, turn_len=BLOCK, answer_len=BLOCK)
    assert load.blocks == 4
    assert asked(Blocks(load), load) == {(0, 0): 0, (1, 0): 0, (0, 1): BLOCK, (1, 1): 0}
    assert found_shares(load)[STOCK] == 0.25


def test_the_last_token_of_a_prompt_is_computed():
    load = scenario(system_len=0, turn_len=2 * BLOCK, answer_len=BLOCK)
    cache = Blocks(load)
    assert [cache.ask(0, 0), cache.ask(0, 0), cache.ask(0, 1)] == [0, BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("pool", [1, 2, 3, 4])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_blocks_go_as_those_of_vllm_do(pool, is_shared, in_turns):
    load = scenario(4, 5, pool, system_len=300, turn_len=100, answer_len=90)
    load = replace(load, is_shared=is_shared, in_turns=in_turns)
    assert asked(Blocks(load), load) == vllm_finds(load)


def vllm_finds(load: Scenario) -> dict[tuple[int, int], int]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    config = KVCacheConfig(load.blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, load.max_len, BLOCK, BLOCK, enable_caching=True)
    params = SamplingParams(max_tokens=load.answer_len)
    said, found = {chat: [] for chat in range(load.chats)}, {}
    for chat, turn in load.order():
        said[chat] += load.words(0, chat)[turn]
        request = Request(f"{chat} {turn}", list(said[chat]), params, None, block_hasher=hasher)
        blocks, found[chat, turn], _ = manager.get_computed_blocks(request)
        read = request.num_tokens - found[chat, turn]
        assert manager.allocate_slots(request, read, found[chat, turn], blocks) is not None
        request.num_computed_tokens = request.num_tokens
        answer = [chat + turn + index for index in range(load.answer_len)]
        for token in answer[:-1]:
            request.append_output_token_ids(token)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        manager.free(request)
        said[chat] += answer
    return found


# Ours.


def test_one_chat():
    """Its second turn begins with the system text, of which 64 entries are left. Its first question and answer have
    319 tokens that are stored, so nine pages, and the last 20 are read again: 80 are kept, a quarter of them by right.
    """
    load = scenario()
    assert load.known_len == 576
    assert asked(Chains(load), load) == {(0, 0): 0, (0, 1): 256}
    assert asked(Chains(load, tails=True), load) == {(0, 0): 0, (0, 1): 256 + 288}
    assert asked(Chains(load, tails=True, policy="kvzip"), load)[0, 1] == 256 + 288
    assert found_shares(load) == {STOCK: 512 / 576, CHAINS: 256 / 576, TAILS: 544 / 576, PERFECT: 1.0}


def test_the_window_is_read_again():
    """A turn of 323 tokens keeps 80, of which a quarter are its last ones. Of 322 that are stored a policy with a
    window may use 303, nine pages, one without all ten. A turn of 345 tokens keeps 86, and 324 may be used."""
    for answer_len, policy, pages in ((67, "ada-snapkv", 9), (67, "kvzip", 10), (89, "ada-snapkv", 10)):
        load = scenario(answer_len=answer_len)
        assert asked(Chains(load, tails=True, policy=policy), load)[0, 1] == 256 + 32 * pages


def test_tails_go_before_any_chain():
    """The 28 pages of a row hold the two parts of 2.5 pages, two tails of 10 pages, but not what the first chat needs
    in its second turn as well, 11 pages to read a part, and 3.5 for that and 11 more for the last question."""
    load = scenario(chats=2)
    assert load.blocks * BLOCK == 28 * 32
    found = asked(Chains(load, tails=True), load)
    assert found == {(0, 0): 0, (1, 0): 0, (0, 1): 256 + 288, (1, 1): 256}
    larger = replace(load, pool=2)
    assert asked(Chains(larger, tails=True), larger)[1, 1] == 256 + 288


def test_the_oldest_tail_goes_first():
    """Parts hold 3.5 of 32 pages, tails 10. The third chat reads its system text in 12.5, so that one tail goes, and
    what it asks takes 11, which leaves half a page."""
    load = scenario(chats=3, system_len=384)
    assert load.blocks * BLOCK == 32 * 32
    for chat, tail in ((1, 288), (0, 0)):
        cache = Chains(load, tails=True)
        assert [cache.ask(other, 0) for other in range(3)] == [0, 0, 0]
        assert cache.ask(chat, 1) == 384 + tail


def test_what_is_read_needs_room_until_it_is_evicted():
    """A system text of 1,024 tokens takes 32.5 of 52 pages, and 8.5 afterwards: there is room for two others."""
    three, four = scenario(chats=3, system_len=1024), scenario(chats=4, system_len=1024)
    assert three.blocks * BLOCK == 52 * 32
    assert set(asked(Chains(three), three).values()) == {0, 1024}
    assert not any(asked(Chains(four), four).values())


def test_what_was_used_stays():
    """There is room for two parts of three, and the first one was used after the second."""
    load = scenario(chats=3, budget=0.75)
    cache = Chains(load)
    assert [cache.ask(chat, 0) for chat in (0, 1, 0, 2)] == [0, 0, 256, 0]
    assert [cache.ask(chat, 0) for chat in (0, 1)] == [256, 0]


def test_chains_go_where_they_do_not_fit():
    """Parts hold 6.5 pages: two of them leave room for the 11 of a last question, three do not. In its second turn a
    chat keeps 8.5 pages more, and one of the others has to go."""
    two, three = scenario(chats=2, budget=0.75), scenario(chats=3, budget=0.75)
    assert asked(Chains(two), two) == {(0, 0): 0, (1, 0): 0, (0, 1): 256, (1, 1): 0}
    assert not any(asked(Chains(three), three).values())
    assert found_shares(replace(three, pool=3))[CHAINS] == 256 / 576


def test_a_chain_goes_from_its_end():
    """A chat of three parts holds 21.5 of 40 pages in a row. Two of another take 14, and 11 more for its question."""
    load = replace(scenario(chats=2, turns=3, budget=0.75), in_turns=False)
    assert load.blocks * BLOCK == 40 * 32
    cache = Chains(load)
    assert [cache.ask(0, turn) for turn in range(3)] == [0, 256, 576]
    assert cache.ask(0, 2) == 896
    assert cache.ask(1, 1) == 0 and cache.ask(0, 2) == 576


def test_short_turns_are_evicted_with_the_next():
    load = scenario(turns=4, system_len=0, turn_len=100, answer_len=50)
    assert asked(Chains(load), load) == {(0, 0): 0, (0, 1): 0, (0, 2): 0, (0, 3): 300}
    assert asked(Chains(load, least=150), load) == {(0, 0): 0, (0, 1): 0, (0, 2): 150, (0, 3): 300}


def test_a_system_text_that_all_share_is_found_by_all():
    load = replace(scenario(chats=3, pool=3), is_shared=True)
    assert load.known_len == 3 * 576 + 2 * 256
    assert asked(Chains(load), load) == {(0, 0): 0} | {key: 256 for key in load.order()[1:]}
    assert set(asked(Blocks(load), load).values()) == {0, 256, 512}


# The benchmark's loads.


def test_agents_find_nearly_all():
    """Where memory holds six whole chats of sixteen, what is left of all of them fits, with their tails."""
    later = AGENTS.chats * sum(AGENTS.prompt_len(turn) for turn in range(1, AGENTS.turns))
    shares = found_shares(AGENTS)
    of_prompts = {name: round(share * AGENTS.known_len / later, 3) for name, share in shares.items()}
    assert of_prompts == {STOCK: 0.015, CHAINS: 0.862, TAILS: 0.935, PERFECT: 0.942}
    assert {name: round(share, 3) for name, share in shares.items()} == {
        STOCK: 0.016,
        CHAINS: 0.915,
        TAILS: 0.992,
        PERFECT: 1.0,
    }


def test_memory_and_order_decide():
    """As a control: in memory for three chats little is left, and what would fit is dropped before it is used."""
    three, all_fit = found_shares(replace(AGENTS, pool=3)), found_shares(replace(AGENTS, pool=16))
    assert three[STOCK] == 0 and 0.3 < three[CHAINS] < three[TAILS] < 0.6
    assert all_fit[TAILS] == found_shares(AGENTS)[TAILS] and all_fit[STOCK] > 0.95


def test_a_run_on_record_found_what_chains_and_tails_can():
    record = json.loads((RESULTS / "chat-agents-12.json").read_text())["results"]["scenarios"]["agents"]
    (run,) = record["rounds"]
    shares = found_shares(AGENTS)
    for side, cache in ((STOCK, STOCK), ("ada-snapkv by turns", TAILS), ("kvzip by turns", TAILS)):
        assert run[side]["cached"] == pytest.approx(shares[cache] * AGENTS.known_len)
