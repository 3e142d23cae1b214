"""Ratios of paired runs, their intervals, and what is written."""

import json

import pytest

from benchmarks.harness.measure import paired_ratio, record, save
from vllm_kvevict.kernels import processor


def test_ratio_is_the_median_of_the_pairs_and_not_a_ratio_of_medians():
    found = paired_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0])
    assert found.median == 3.0 and 2.0 <= found.low < found.median < found.high <= 4.0


def test_what_both_sides_of_a_pair_suffer_cancels():
    noise = [1.0, 7.0, 0.3, 2.0, 5.0, 1.5, 40.0]
    found = paired_ratio([1.25 * value for value in noise], noise)
    assert (found.low, found.median, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_record_says_how_and_where(tmp_path):
    content = record("throughput", {"pairs": [1, 2]})
    path = save("example", content, tmp_path / "results")
    read = json.loads(path.read_text())
    assert read == content
    assert read["command"].startswith("python -m benchmarks.throughput")
    assert set(read) >= {"command", "date", "cpu", "level", "versions", "results"}
    assert read["level"] == processor.level()
    assert set(read["versions"]) >= {"python", "vllm", "torch", "vllm-kvevict"}
