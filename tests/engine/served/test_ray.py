"""Workers of another node, reached through Ray: plans, decisions and reports travel as on one machine."""

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.documents import ROOT, lines
from tests.engine.support.ray_nodes import HEAD, OTHER, run_lines, run_on_ray
from tests.engine.support.running import Ask, evicting_engine, run

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
    for ask, one, other in zip(ASKS, expected, result["answers"], strict=True):
        assert (other.tokens, other.kept) == (one.tokens, one.kept), ask
        assert bool(other.kept) == (ask.policy != "full")


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_commands_of_the_guide():
    """As they stand there, with two addresses of this machine. In the place of vLLM, whose CPU platform refuses Ray, a
    program joins the cluster and says which nodes it has."""
    written = [line.split("#")[0] for line in lines(ROOT / "docs/CLUSTER.md") if "--nnodes" not in line]
    programs = ["pip", "ray get-auth-token", "ray start --head", "ray start --address", "vllm serve"]
    assert len(written) == len(programs)
    assert all(program in line for program, line in zip(programs, written, strict=True))
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        port = str(probe.getsockname()[1])
    text = "\n".join(written).replace("10.0.0.1", HEAD).replace("10.0.0.2", OTHER).replace("6379", port)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        said = run_lines(Path(folder), text.splitlines())
    assert f"NODES {HEAD} {OTHER}" in said, said
