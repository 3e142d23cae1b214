"""Workers of another node, reached through Ray: plans, decisions and reports travel as on one machine."""

import sys
import tempfile
from pathlib import Path

import pytest

from tests.engine.support.ray_nodes import HEAD, OTHER, run_on_ray
from tests.engine.support.running import Ask, assert_same, evicting_engine, run

ASKS = [
    Ask(300, "ada-snapkv", 0.2, max_tokens=6),
    Ask(280, "lava", 0.2, seed=1, max_tokens=6),
    Ask(150, "full", max_tokens=6),
]
SETTINGS = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 256}


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_two_nodes(model):
    """Stages, because they say more to the scheduler than tensor-parallel ranks, which only add collectives."""
    settings = {**SETTINGS, "pipeline_parallel_size": 2}
    with evicting_engine(model, **settings, distributed_executor_backend="mp") as llm:
        expected = run(llm, ASKS)
    # The paths of Ray's sockets must be short, which those of pytest are not.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        task = {"model": str(model), "asks": ASKS, "settings": settings}
        result = run_on_ray(Path(folder), task, slots=1, VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1")
    assert result["executor"] == "RayExecutorV2"
    assert [address for address, _ in result["places"]] == [HEAD, OTHER]
    assert_same(expected, result["answers"])
    assert [bool(answer.kept) for answer in expected] == [ask.policy != "full" for ask in ASKS]
