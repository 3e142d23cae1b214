"""A first part that stays whole: what follows is evicted beside it, and goes on from the cache as if it had read it."""

from typing import Any

import pytest

from tests.engine.served import test_chains
from tests.engine.served.test_cached_prefixes import SERVERS
from tests.engine.served.test_chains import ABLE, BASE, OPTIONS, check
from tests.engine.served.test_inspect_turns import SAID, chat, kept_on_a_server
from tests.engine.support.conversations import SPOKEN, Turn, conversation, found_by, turn
from tests.engine.support.hits_and_misses import metric
from tests.engine.support.inspecting import page_of
from tests.engine.support.running import evicting_engine, run, run_preempted
from vllm_kvevict.chats import Chat
from vllm_kvevict.engine.scheduler.shared import prefixes
from vllm_kvevict.engine.scheduler.shared.tails import Tails

pytestmark = pytest.mark.engine

model = test_chains.model
WHOLE = SPOKEN[0][1]
POLICIES = ("ada-snapkv", "kvzip", "lava", "h2o")


def asked(policy: str) -> list[Turn]:
    return conversation(policy, ABLE.index(policy), whole=WHOLE)


@pytest.fixture(scope="module")
def read(model):
    """What each request says that reads its whole prompt, by policy."""
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "enable_prefix_caching": False}) as llm:
        return {policy: run(llm, asked(policy), logits=True, recorded=False) for policy in POLICIES}


def without_tails(monkeypatch) -> None:
    monkeypatch.setattr(Tails, "part_from", lambda tails, request, account, untold: None)


@pytest.mark.parametrize("name", SERVERS)
def test_hits_say_what_misses_say(name: str, model, read, monkeypatch) -> None:
    """Turn by turn, all at once again, and all at once after a reset, when some wait for others; without tails."""
    without_tails(monkeypatch)
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, **SERVERS[name]}) as llm:
        for policy in POLICIES:
            asks, before = asked(policy), metric(llm, "prefix_cache_hits")
            check([run(llm, [ask], logits=True, recorded=False)[0] for ask in asks], read[policy])
            assert metric(llm, "prefix_cache_hits") - before == found_by(asks)
            before = metric(llm, "prefix_cache_hits")
            check(run(llm, asks, recorded=False), read[policy])
            assert metric(llm, "prefix_cache_hits") - before == sum(ask.turns[-1] for ask in asks)
            assert llm.reset_prefix_cache()
            check(run(llm, asks, recorded=False), read[policy])


@pytest.mark.parametrize("policy", ["lava", "kvzip"])
def test_preempted_and_with_tails(model, read, policy: str) -> None:
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 48}) as llm:
        for at in (1, 2, 4, 7):
            check(run_preempted(llm, asked(policy), at), read[policy])
            check(run(llm, asked(policy), recorded=False), read[policy])
            assert llm.reset_prefix_cache()


def another(policy: str, **fields: Any) -> Turn:
    """What the first conversation says, by another policy."""
    return turn(policy, SPOKEN[:3], ABLE.index(POLICIES[0]), **fields)


def test_who_begins_with_it(model, read, monkeypatch) -> None:
    """Whoever keeps the same first part whole, with any policy; nobody else."""
    without_tails(monkeypatch)
    with evicting_engine(model, eviction=OPTIONS, **BASE) as llm:
        run(llm, asked(POLICIES[0])[:1], recorded=False)
        for ask, found in (
            (another("keydiff", whole=WHOLE), WHOLE),
            (another("kvzip", whole=WHOLE), WHOLE),
            (another(POLICIES[0]), 0),
            (another(POLICIES[0], whole=SPOKEN[0][1] + SPOKEN[1][1]), 0),
            (another(POLICIES[0], whole=WHOLE), WHOLE),
        ):
            before = metric(llm, "prefix_cache_hits")
            answer = run(llm, [ask], recorded=False)[0]
            assert metric(llm, "prefix_cache_hits") - before == found, ask
        assert answer.tokens == read[POLICIES[0]][1].tokens


def test_a_compressed_part_in_its_place_is_noticed(model, read, monkeypatch) -> None:
    """The control: were it found by its tokens alone, what another request has compressed would be taken for it."""
    monkeypatch.setattr(prefixes, "_how", lambda part: (part.begins, part.end))
    with evicting_engine(model, eviction=OPTIONS, **BASE) as llm:
        run(llm, [another(POLICIES[0])], recorded=False)
        answer = run(llm, [another(POLICIES[0], whole=WHOLE)], recorded=False)[0]
        assert answer.tokens != read[POLICIES[0]][1].tokens


def test_the_page_of_a_chat_shows_what_a_server_keeps(models) -> None:
    options = {"min_turn": 32, "scope": "turns", "keep_first": True}
    with evicting_engine(models("llama"), eviction=options, max_num_batched_tokens=128) as llm:
        for policy in ("ada-snapkv", "kvzip"):
            page = page_of(llm, [policy], chats=[Chat(chat(*SAID[:3]))])
            kept, _ = kept_on_a_server(llm, chat(*SAID[:3]), policy)
            first, end = page["turns"][0], page["turns"][-1]
            shown = page["policies"][0]
            assert [[[x for x in head if x < end] for head in layer] for layer in shown["kept"]] == kept
            assert all(head[:first] == list(range(first)) for layer in kept for head in layer)
            assert shown["entries_per_turn"][1] < 8 * (end - first) // 2
        # Nothing behind it yet.
        page = page_of(llm, ["snapkv"], chats=[Chat(chat(SAID[0]))])
        assert len(page["turns"]) == 1 and page["policies"][0]["entries_per_turn"][0] == 8 * page["turns"][0]
