"""What is told of each eviction: joined from all ranks, in the file of `eviction_log`."""

import json
import logging
import os

import pytest

from tests.engine.support.running import Ask, evicting_engine, run
from tests.schedules.ranks import eviction_of_eight_ranks, part
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.frontend import checks
from vllm_kvevict.engine.metrics import EvictionStats
from vllm_kvevict.engine.scheduler.evictions import EvictionLog
from vllm_kvevict.schedules.reports import EvictionRecord, join


@pytest.fixture
def eviction() -> EvictionRecord:
    return eviction_of_eight_ranks()


@pytest.fixture
def records():
    """What the project logs, at level DEBUG unless a test sets another."""
    logger, handler = logging.getLogger("vllm.kv_eviction"), logging.Handler()
    found: list[logging.LogRecord] = []
    handler.emit = found.append
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_what_is_told_of_the_cache_adds_up_or_is_the_latest():
    before, later = EvictionStats(), EvictionStats()
    before.on_cache(5, 3, 2, {"turns": 100, "tail": 32})
    before.on_cache(6, 4, 1, {"tail": 8})
    later.on_cache(4, 2, 0, {"prefix": 7, "turns": 1})
    told = before.aggregate(later).data
    assert (told["cached_entries"], told["cached_conversations"], told["cache_drops"]) == (4, 2, 3)
    assert told["found"] == {"turns": 101, "tail": 40, "prefix": 7}


def test_what_is_told_of_lookaheads():
    before, later = EvictionStats(), EvictionStats()
    before.on_lookahead(0, [])
    assert before.is_empty() and "ended in lookahead" not in before.reduce()
    before.on_lookahead(1, [0.25])
    later.on_lookahead(2, [])
    told = before.aggregate(later)
    assert told.data["lookahead"] == {"ended": 3, "step_seconds": [0.25]}
    assert told.reduce() == {
        "evictions": 0,
        "ended in lookahead": 3,
        "slowest lookahead step": 0.25,
        "pages held": 0,
    }


def test_the_lines_for_programs(eviction, tmp_path):
    path = tmp_path / "evictions.jsonl"
    path.write_text("what was there before\n")
    log = EvictionLog(str(path))
    log.write(eviction)
    log.write(join('a "name"\nof a client', 500, [part(0, 0, [[90]])]))
    before, first, second = path.read_text().splitlines()
    assert before == "what was there before"
    assert json.loads(first) == {
        "request": "r",
        "tokens": 500,
        "policy": "ada-snapkv",
        "kept": 400,
        "stored": 2000,
        "freed_pages": 192,
        "held_pages": 256,
        "heads": [[90, 110], [120, 80]],
        "decision_seconds": 7,
        "compaction_seconds": 14,
        "phase": "prefill",
        "pinned": 0,
    }
    assert json.loads(second)["request"] == 'a "name"\nof a client'


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "folder gone"])
def test_a_file_that_cannot_be_written_is_warned_of_once(eviction, records, tmp_path, full):
    path = tmp_path / "gone" / "evictions.jsonl"
    log = EvictionLog("/dev/full" if full else str(path))
    logging.getLogger("vllm.kv_eviction").setLevel(logging.INFO)
    for _ in range(3):
        log.write(eviction)
    (warning,) = records
    assert warning.levelname == "WARNING" and repr(log.path) in warning.getMessage()
    assert ("No space left" if full else "No such file") in warning.getMessage()
    if not full:
        path.parent.mkdir()
        log.write(eviction)
        assert len(path.read_text().splitlines()) == 1 == len(records)


def refused(path: str) -> str:
    """The sentence that a path is refused with."""
    with pytest.raises(KVEvictionError) as error:
        checks.check_eviction_log(path)
    sentence = str(error.value)
    assert sentence.startswith(f"--kv-eviction-config.eviction_log: cannot append to {path!r} (")
    assert "\n" not in sentence and ". " not in sentence
    return sentence


def test_a_path_that_cannot_be_appended_to_is_refused(tmp_path):
    assert "No such file" in refused(str(tmp_path / "no" / "folder"))
    assert "not a regular file" in refused(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(str(tmp_path / "pipe"))
    assert "null" in refused("\0")
    (tmp_path / "file").write_text("x\n")
    checks.check_eviction_log(str(tmp_path / "file"))
    checks.check_eviction_log(str(tmp_path / "new"))
    checks.check_eviction_log(None)
    assert (tmp_path / "file").read_text() == "x\n" and (tmp_path / "new").read_text() == ""


@pytest.mark.engine
def test_an_engine_writes_what_each_layer_and_head_kept(models, tmp_path):
    path = tmp_path / "evictions.jsonl"
    asks = [Ask(300, "ada-snapkv", 0.2, max_tokens=1), Ask(200, "snapkv", 64.0), Ask(100, "full")]
    with evicting_engine(models("llama"), eviction={"eviction_log": str(path)}) as llm:
        answers = run(llm, asks)
    lines = {line["policy"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert set(lines) == {"ada-snapkv", "snapkv"}
    for ask, answer in zip(asks[:2], answers[:2], strict=True):
        line, (kept,) = lines[ask.policy], answer.kept
        assert line["heads"] == [[len(head) for head in kept[layer]] for layer in sorted(kept)]
        assert (line["tokens"], line["stored"]) == (ask.length, 8 * ask.length)
        assert line["kept"] == sum(map(sum, line["heads"]))
