"""Conversations of the soak: what is asked, and what must be answered; no server is started."""

import json
from collections import defaultdict

from benchmarks.harness.conversations import BLOCK, GOES_ON, WEIGHTS, Turn
from benchmarks.harness.traffic import EXPECTED, LEFT, WRONG, Answer, Ask, Outcome, Traffic
from benchmarks.soak import LONGEST_PROMPT, MAX_LEN
from vllm_kvevict.policies import available
from vllm_kvevict.policies.registry import policies_for_parts

# Without one policy, as under pipeline parallelism: no request may name it.
PROBES = {policy: ({"prompt": "w9", "max_tokens": 3}, " w1") for policy in available() if policy != "tova"}
FIRST = Turn(("w1 w2 w3 w4", "w5 w6"), 3)
LATER = Turn((*FIRST.said, "w7", "w8"), 3)


def test_turns_end_where_answers_do():
    assert FIRST.ends == [4] and LATER.ends == [4, 7] and LATER.is_later and not FIRST.is_later
    assert LATER.prompt("completions") == {"prompt": "w1 w2 w3 w4 w5 w6 w7 w8"}
    messages = LATER.prompt("chat")["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in messages] == [*LATER.said]


def test_only_chains_of_several_turns_are_found():
    """One turn may be found as a single prefix is, and whole blocks as uncompressed ones are."""
    found = [cached for cached in range(9) if LATER.is_found(cached)]
    assert found == [7]
    block = Turn(("w1 w2 w3 w4", "w " * (BLOCK - 5), "w7", "w8"), 3)
    assert block.ends == [4, BLOCK] and not block.is_found(BLOCK)


def answered_asks(count: int) -> list[Ask]:
    """What clients ask who hear answers at once, and what they ask while those of every fifth are on the way."""
    requests = Traffic("m", 0, LONGEST_PROMPT, MAX_LEN, PROBES)
    found = []
    for number in range(count):
        found.append(ask := requests.next())
        if number % 5:
            text = f" w{number % 400 + 9}" * (ask.tokens // ask.choices)
            requests.hear(ask, Outcome(EXPECTED, 200, answer=Answer([], ask.tokens, text)))
    return found


def test_conversations_go_on_and_branch():
    asked = [ask for ask in answered_asks(4000) if ask.kind.startswith("conversation")]
    assert {ask.kind.removesuffix(", left") for ask in asked} == {f"conversation, {how}" for how in WEIGHTS}
    assert max(len(ask.turn.said) for ask in asked if ask.turn) > 6
    assert any(ask.choices > 1 for ask in asked) and any(ask.stream for ask in asked)
    fields_of, salts, next_questions = {}, defaultdict(set), defaultdict(set)
    for ask in asked:
        if (turn := ask.turn) is None:
            continue
        body = json.loads(ask.content)
        fields = body["vllm_xargs"]
        # A turn is asked again, by others too, but never in another way.
        assert fields_of.setdefault(turn, fields) == fields and fields["kv_turns"] == turn.ends
        salts[turn].add(body.get("cache_salt"))
        next_questions[turn.said[:-1]].add(turn.said[-1])
        if GOES_ON in ask.kind:
            assert turn.said[:-2] in {before.said for before in fields_of}
    assert any(len(of_turn) > 1 for of_turn in salts.values())
    assert any(len(said) > 3 and len(questions) > 1 for said, questions in next_questions.items())
    policies = {fields["kv_eviction"] for fields in fields_of.values()}
    assert policies == set(policies_for_parts()) - {"full", "tova"}


def test_turns_fit():
    for ask in answered_asks(20000):
        if ask.turn is not None:
            words = sum(len(text.split()) for text in ask.turn.said)
            assert words <= LONGEST_PROMPT and words + ask.turn.tokens + len(ask.turn.said) < MAX_LEN
            assert ask.turn.ends == sorted(set(ask.turn.ends)) and ask.turn.ends[-1] < words
            assert ask.tokens == ask.choices * ask.turn.tokens


def test_the_same_turn_must_be_answered_in_the_same_way():
    requests = Traffic("m", 0, 50, MAX_LEN, PROBES)
    turn = Ask("conversation", "/v1/completions", b"", tokens=3, turn=LATER)
    other = Ask("completions", "/v1/completions", b"", tokens=3)

    def hear(ask: Ask, text: str, result: str = EXPECTED) -> str:
        return requests.hear(ask, Outcome(result, 200, answer=Answer(["length"], 3, text))).result

    assert hear(turn, " w2", WRONG) == WRONG  # and is not what others must be answered
    assert hear(turn, " w1") == hear(turn, " w1") == EXPECTED
    assert hear(turn, " w2") == WRONG
    assert hear(other, " w1") == hear(other, " w2") == EXPECTED
    assert requests.hear(turn, Outcome(LEFT)).result == LEFT
