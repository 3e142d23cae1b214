"""What is written of a measurement."""

import json

from benchmarks.harness.measure import record, save
from vllm_kvevict.kernels import processor


def test_record_says_how_and_where(tmp_path):
    content = record("throughput", {"pairs": [1, 2]})
    path = save("example", content, tmp_path / "results")
    read = json.loads(path.read_text())
    assert read == content
    assert read["command"].startswith("python -m benchmarks.throughput")
    assert set(read) >= {"command", "date", "cpu", "level", "versions", "results"}
    assert read["level"] == processor.level()
    assert set(read["versions"]) >= {"python", "vllm", "torch", "vllm-kvevict"}
