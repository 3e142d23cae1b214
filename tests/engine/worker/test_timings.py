"""Times of kernels are kept, so that all starts and ranks of a machine choose the same kernels."""

import dataclasses
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_kvevict.engine.worker.calibration import Shape
from vllm_kvevict.engine.worker.timings import Times, kept, times_file
from vllm_kvevict.kernels.layout import KVLayout

FASTER, SLOWER = Times(kernel=1.0, op=2.0), Times(kernel=2.0, op=1.0)
SIZES: dict[str, Any] = {"page_size": 32, "rows": 1, "model_rows": 1, "head_dim": 64, "dtype": "float32"}
SHAPE = Shape(KVLayout.of_heads(**SIZES), 2, 512)


def _never() -> Times:
    raise AssertionError("measured again")


def _measure(file: Path, kernel: float, queue) -> None:
    measured = []

    def measure() -> Times:
        measured.append(kernel)
        time.sleep(0.2)
        return Times(kernel, 1.0)

    queue.put((kept(file, measure), len(measured)))


@pytest.mark.parametrize("content", ["", "{"])
def test_of_ranks_that_start_together_one_measures_for_all(tmp_path, content):
    if content:
        (tmp_path / "times.json").write_text(content)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_measure, args=(tmp_path / "times.json", 1.0 + number, queue))
        for number in range(6)
    ]
    for process in processes:
        process.start()
    found, measured = zip(*(queue.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert len(set(found)) == 1 and sum(measured) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"times.json", "times.lock"}


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"[]",
        b'{"kernel": 1.0}',
        b'{"kernel": "a", "op": 1.0}',
        b'{"kernel": 0.0, "op": 1.0}',
        b"\xff",
    ],
)
def test_what_was_measured_once_holds_for_later_starts(tmp_path, content):
    """A file that says nothing is written anew."""
    file = tmp_path / "times.json"
    if content is not None:
        file.write_bytes(content)
    assert kept(file, lambda: FASTER) == FASTER
    assert kept(file, _never) == FASTER


def test_where_nothing_can_be_written_each_start_measures(tmp_path):
    (tmp_path / "no folder").touch()
    file = tmp_path / "no folder" / "times.json"
    assert kept(file, lambda: FASTER) == FASTER
    assert kept(file, lambda: SLOWER) == SLOWER


def test_whatever_changes_the_times_has_a_file_of_its_own(monkeypatch):
    files = {times_file("prefill_attention", SHAPE), times_file("decode_attention", SHAPE)}
    sizes = {"page_size": 16, "head_dim": 128, "rows": 2, "dtype": "bfloat16"}.items()
    changes = [{"layout": KVLayout.of_heads(**SIZES | dict([size]))} for size in sizes]
    for change in (*changes, {"group": 4}, {"new_tokens": 1}):
        files.add(times_file("prefill_attention", dataclasses.replace(SHAPE, **change)))
    monkeypatch.setattr("vllm.__version__", "another")
    files.add(times_file("prefill_attention", SHAPE))
    monkeypatch.setattr("vllm_kvevict.machine.cpu_model", lambda: "another")
    files.add(times_file("prefill_attention", SHAPE))
    monkeypatch.setenv("VLLM_KVEVICT_CPU_LEVEL", "avx")
    files.add(times_file("prefill_attention", SHAPE))
    assert len(files) == 11
    monkeypatch.undo()
    assert times_file("prefill_attention", SHAPE) in files
