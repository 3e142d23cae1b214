"""The soak's updates of weights: its questions, who must answer what, and its verdict; no server is started."""

import asyncio
import itertools
import random
from collections import Counter

import httpx
import pytest

from benchmarks.harness import update_soak
from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.server import Snapshot
from benchmarks.harness.traffic import EXPECTED, HUNG, LEFT, WRONG, Answer, Outcome
from benchmarks.harness.update_soak import UpdateSoak
from benchmarks.harness.updates import (
    ABORTED,
    DOCUMENTS,
    MIXABLE,
    MIXED,
    STALE,
    UPDATES,
    WHOLE,
    WITHOUT_RESET,
    Chat,
    Timeline,
    Update,
    about_documents,
    found_in,
    in_turns,
    judge,
)
from benchmarks.soak import parse_arguments
from vllm_kvevict.policies import available

# Questions.


def test_questions_are_of_all_policies_and_share_beginnings():
    questions = about_documents(list(available()), seed=0)
    assert {question.fields["kv_eviction"] for question in questions} == set(available())
    shared = Counter()
    for question in questions:
        if question.kind == "compressed prefix":
            words = question.prompt["prompt"].split()[: question.fields["kv_prefix_len"]]
            shared[" ".join(words), tuple(question.fields.items())] += 1
    assert set(shared.values()) == {3} and len(shared) == 2 * len(DOCUMENTS)
    assert {"kvzip", "ada-snapkv"} <= {dict(fields)["kv_eviction"] for _, fields in shared}
    assert len({question.prompt["prompt"] for question in questions}) == len(questions)


def test_hits_tell_which_cache_they_are_of():
    assert {found_in(words) for words in DOCUMENTS} == {"compressed prefix"}
    assert found_in(3 * BLOCK) == "uncompressed prefix" and found_in(0) == "nothing"


def test_all_updates_come_equally_often():
    times = Counter(itertools.islice(in_turns(UPDATES, 0), 5 * len(UPDATES)))
    assert times == dict.fromkeys(UPDATES, 5)
    assert {update.pause for update in UPDATES} == {"abort", "wait", "keep", None}
    assert all(update.clears or update.reset for update in UPDATES)
    assert len({str(update) for update in UPDATES}) == 8


def test_the_control_resets_nothing_and_has_a_record_of_its_own():
    control = UpdateSoak(parse_arguments(["--minutes", "1", "--updates", "--without-reset"]))
    assert (control.name, control.ways) == ("soak-without-reset", WITHOUT_RESET)
    assert not any(update.clears or update.reset for update in control.ways)


# Who must answer what.

TABLE = ["old", "new", "newest"]


def whole(text: str, cached: int = 0) -> Outcome:
    return Outcome(EXPECTED, 200, answer=Answer(["length"], 3, text, cached))


def cut_short(*ends: str) -> Outcome:
    return Outcome(WRONG, 200, "cut short", Answer(list(ends), 1, "o"))


def updated(update: Update, weights: int = 1) -> Timeline:
    """From weights 0 to others."""
    timeline = Timeline()
    timeline.begin(update)
    timeline.settle(weights)
    return timeline


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_what_is_sent_after_an_update_must_be_of_the_new_weights(update):
    timeline = updated(update)
    sent = timeline.moment
    assert judge(timeline, sent, whole("new"), TABLE) == EXPECTED
    assert judge(timeline, sent, whole("old"), TABLE) == judge(timeline, sent, whole("mixed"), TABLE) == STALE
    assert judge(timeline, sent, cut_short("abort"), TABLE) == WRONG


@pytest.mark.parametrize("sent", [0, 1])
@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_what_was_there_before(update, sent):
    """Pauses that let requests end, or abort them, leave none with several sets of weights."""
    timeline = updated(update)
    mixes = update.pause in (None, "keep")
    for text in ("old", "new"):
        assert judge(timeline, sent, whole(text), TABLE) == (MIXABLE if mixes else WHOLE)
    for text in ("mixed", "newest"):
        assert judge(timeline, sent, whole(text), TABLE) == (MIXABLE if mixes else MIXED)
    for ends in (["abort"], []):
        assert judge(timeline, sent, cut_short(*ends), TABLE) == (
            ABORTED if update.pause == "abort" else WRONG
        )
    assert judge(timeline, sent, cut_short("stop"), TABLE) == WRONG


def test_while_an_update_is_under_way():
    timeline = Timeline()
    timeline.begin(Update("wait", clears=True))
    assert judge(timeline, 0, whole("old"), TABLE) == judge(timeline, 1, whole("old"), TABLE) == WHOLE
    assert judge(timeline, 0, whole("new"), TABLE) == MIXED
    timeline.settle(1)
    sent = timeline.moment
    timeline.begin(Update("keep", reset="soft"))
    assert judge(timeline, sent, whole("new"), TABLE) == MIXABLE


def test_all_that_happened_on_the_way_counts():
    timeline = updated(Update("keep", reset="hard"))
    sent = timeline.moment
    for update, weights in ((Update("wait", clears=True), 0), (Update("abort", reset="soft"), 2)):
        timeline.begin(update)
        timeline.settle(weights)
    for text in TABLE:
        assert judge(timeline, sent, whole(text), TABLE) == WHOLE
    assert judge(timeline, sent, cut_short("abort"), TABLE) == ABORTED
    assert judge(timeline, 0, whole("old"), TABLE) == MIXABLE


# An update as the server sees it.


def calls(update: Update) -> list[str]:
    """What is asked of a server, whose clients are left out."""
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.url.path}?{request.url.query.decode()}".rstrip("?"))
        return httpx.Response(200, json={})

    async def one() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as client:
            soak = UpdateSoak(parse_arguments(["--requests", "1", "--updates"]))
            soak.models = [update_soak.FOLDER] * update_soak.WEIGHTS
            await soak._update(client, update, random.Random(0))
            assert soak.timeline.moment == 2 and soak.timeline.weights

    asyncio.run(one())
    return seen


SOFT, HARD = (f"/reset_prefix_cache?reset_running_requests={hard}" for hard in ("false", "true"))


@pytest.mark.parametrize(
    "update, expected",
    [
        (Update("wait", clears=True), ["/pause?mode=wait&clear_cache=true", "/collective_rpc", "/resume"]),
        (
            Update("keep", reset="hard"),
            ["/pause?mode=keep&clear_cache=false", "/collective_rpc", HARD, "/resume"],
        ),
        (Update("abort"), ["/pause?mode=abort&clear_cache=false", "/collective_rpc", "/resume"]),
        (Update(None, reset="soft"), ["/collective_rpc", SOFT]),
    ],
    ids=str,
)
def test_an_update(update, expected, monkeypatch):
    monkeypatch.setattr(update_soak, "LONGEST_PAUSE", 0.0)
    assert calls(update) == expected


# The verdict.


def verdict(*outcomes: Outcome, updates=UPDATES, idle=None, empty=None, tracebacks=0) -> UpdateSoak:
    soak = UpdateSoak(parse_arguments(["--requests", "5", "--updates"]))
    question = Chat("full", seed=0).next()
    soak.answers = {question: TABLE}
    for outcome in outcomes:
        soak.note_answer(question, 0, outcome)
    soak.updates.update(str(update) for update in updates)
    nothing = Snapshot(physical_pages=0)
    soak.idle, soak.empty = idle or nothing, empty or nothing
    soak.judge(tracebacks)
    return soak


GOOD = [whole("old"), whole("old", 3 * BLOCK), whole("old", 75), Outcome(LEFT)]


def missed(soak: UpdateSoak) -> set[str]:
    assert soak.passed == all(requirement.met for requirement in soak.requirements)
    return {requirement.name for requirement in soak.requirements if not requirement.met}


def test_a_good_run_passes():
    soak = verdict(*GOOD)
    assert not missed(soak) and soak.answered == 4 and not soak.failures
    assert soak.results()["counts"]["began with compressed prefix: as expected"] == 1


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"more": [whole("new", 75)]}, {"answers that were not as with nothing cached"}),
        ({"more": [cut_short("abort")]}, {"answers refused, cut short or too long"}),
        ({"more": [Outcome(HUNG)]}, {"requests that hung"}),
        ({"more": [Outcome(WRONG, 500)]}, {"answers refused, cut short or too long", "answers 5xx"}),
        ({"tracebacks": 1}, {"tracebacks in the server's log"}),
        ({"updates": UPDATES[1:]}, {"updates of the rarest kind"}),
        ({"idle": Snapshot(waiting=1)}, {"requests running or waiting when idle"}),
        ({"idle": Snapshot(physical_pages=2, cached_pages=1)}, {"pages held when idle"}),
        ({"empty": Snapshot(physical_pages=1, cached_pages=1)}, {"pages cached after a reset"}),
    ],
)
def test_each_requirement_can_fail(change, expected):
    assert missed(verdict(*GOOD, *change.pop("more", []), **change)) == expected


def test_without_hits_nothing_is_proven():
    kinds = {
        f"share of compared answers with hits in {kind} prefixes" for kind in ("compressed", "uncompressed")
    }
    assert missed(verdict(*[whole("old")] * 50, *GOOD[:1])) == kinds
