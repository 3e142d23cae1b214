"""The soak's updates of weights: its questions, who must answer what, and its verdict; no server is started."""

import asyncio
import random

import httpx
import pytest

from benchmarks.harness import update_soak
from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.traffic import EXPECTED, LEFT, WRONG, Answer, Outcome
from benchmarks.harness.update_soak import UpdateSoak
from benchmarks.harness.updates import (
    ABORTED,
    MIXABLE,
    MIXED,
    STALE,
    UPDATES,
    WHOLE,
    Chat,
    Timeline,
    Update,
    judge,
)
from benchmarks.soak import parse_arguments
from tests.benchmarks.runs import missed

# Questions.


# Who must answer what.

TABLE = ["old", "new", "newest", "other"]


def whole(text: str, cached: int = 0) -> Outcome:
    return Outcome(EXPECTED, 200, answer=Answer(["length"], 3, text, cached))


def cut_short(*ends: str) -> Outcome:
    return Outcome(WRONG, 200, "cut short", Answer(list(ends), 1, "o"))


def updated(*updates: Update) -> Timeline:
    """After updates, whose weights are counted on from 0."""
    timeline = Timeline()
    for weights, update in enumerate(updates, 1):
        timeline.begin(update)
        timeline.settle(weights)
    return timeline


def judged(timeline: Timeline, sent: int, *texts: str) -> set[str]:
    return {judge(timeline, sent, whole(text), TABLE) for text in texts}


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_what_becomes_of_requests_around_an_update(update):
    timeline = updated(update)
    aborted = ABORTED if update.pause == "abort" else WRONG
    for sent in (0, 1):  # before it and while it goes on
        if update.pause in (None, "keep"):
            assert judged(timeline, sent, *TABLE, "mixed") == {MIXABLE}
        else:  # these leave no request with several sets of weights
            assert judged(timeline, sent, "old", "new") == {WHOLE}
            assert judged(timeline, sent, "newest", "mixed") == {MIXED}
        assert {judge(timeline, sent, cut_short(*ends), TABLE) for ends in (["abort"], [])} == {aborted}
        assert judge(timeline, sent, cut_short("stop"), TABLE) == WRONG
    assert judged(timeline, timeline.moment, "new") == {EXPECTED}
    assert judged(timeline, timeline.moment, "old", "mixed") == {STALE}
    assert judge(timeline, timeline.moment, cut_short("abort"), TABLE) == WRONG


def test_while_an_update_is_under_way_and_after_several():
    timeline = Timeline()
    timeline.begin(Update("wait", clears=True))
    assert judged(timeline, 0, "old") == judged(timeline, 1, "old") == {WHOLE}
    assert judged(timeline, 0, "new") == {MIXED}
    timeline = updated(
        Update("keep", reset="hard"), Update("wait", clears=True), Update("abort", reset="soft")
    )
    assert judged(timeline, 2, "new", "newest") == {WHOLE} and judged(timeline, 0, "old") == {MIXABLE}
    assert judge(timeline, 2, cut_short("abort"), TABLE) == ABORTED


# An update as the server sees it.


SOFT, HARD = (f"/reset_prefix_cache?reset_running_requests={hard}" for hard in ("false", "true"))
WEIGHTS, RESUME = "/collective_rpc", "/resume"


@pytest.mark.parametrize(
    "update, expected",
    [
        (Update("wait", clears=True), ["/pause?mode=wait&clear_cache=true", WEIGHTS, RESUME]),
        (Update("keep", reset="hard"), ["/pause?mode=keep&clear_cache=false", WEIGHTS, HARD, RESUME]),
        (Update("abort"), ["/pause?mode=abort&clear_cache=false", WEIGHTS, RESUME]),
        (Update(None, reset="soft"), [WEIGHTS, SOFT]),
    ],
    ids=str,
)
def test_an_update(update, expected, monkeypatch):
    """What is asked of a server, whose clients are left out."""
    monkeypatch.setattr(update_soak, "LONGEST_PAUSE", 0.0)
    soak, seen = UpdateSoak(parse_arguments(["--requests", "1", "--updates"])), []
    soak.models = [update_soak.FOLDER] * update_soak.WEIGHTS

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        return httpx.Response(200, json={})

    async def one() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as client:
            await soak._update(client, update, random.Random(0))

    asyncio.run(one())
    assert seen == expected and soak.timeline.moment == 2 and soak.timeline.weights


# The verdict.


def verdict(*outcomes: Outcome, updates=UPDATES) -> UpdateSoak:
    soak = UpdateSoak(parse_arguments(["--requests", "5", "--updates"]))
    question = Chat("full", seed=0).next()
    soak.answers = {question: TABLE}
    for outcome in outcomes:
        soak.note_answer(question, 0, outcome)
    soak.updates.update(str(update) for update in updates)
    soak.judge(tracebacks=0)
    return soak


GOOD = [whole("old"), whole("old", 3 * BLOCK), whole("old", 75), Outcome(LEFT)]


def test_a_good_run_passes():
    soak = verdict(*GOOD)
    assert not missed(soak) and soak.tally.total() == 4 and not soak.failures
    assert soak.results()["counts"]["began with compressed prefix: as expected"] == 1


HITS = {f"share of compared answers with hits in {kind} prefixes" for kind in ("compressed", "uncompressed")}


@pytest.mark.parametrize(
    "outcomes, expected",
    [
        ((*GOOD, whole("new", 75)), {"answers that were not as with nothing cached"}),
        ((*GOOD, cut_short("abort")), {"answers refused, cut short or too long"}),
        ([whole("old")] * 50 + [*GOOD[:1]], HITS),
    ],
)
def test_each_requirement_can_fail(outcomes, expected):
    assert missed(verdict(*outcomes)) == expected
    assert missed(verdict(*GOOD, updates=UPDATES[1:])) == {"updates of the rarest kind"}
