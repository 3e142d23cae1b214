"""Requests served by an engine on a Ray cluster of two nodes, which differ in their loopback addresses.

vLLM refuses Ray on its CPU platform because that has no Ray resource. :func:`teach_cpu_platform` gives it Ray's "GPU",
of which every node here claims to have some: Ray only counts them.

Runs as a program in a process of its own, because a process that has talked to Ray should not fork workers later:
``python -m tests.engine.support.ray_nodes TASK RESULT``, both pickled files.
"""

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

# Ray takes 127.0.0.1 for "find out this machine's address", but leaves its neighbours alone.
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
ROOT = Path(__file__).parents[3]
WAIT = 240


def teach_cpu_platform() -> None:
    """Give vLLM's CPU platform a Ray resource, in this process."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def run_on_ray(folder: Path, task: dict[str, Any], slots: int, **environment: str) -> dict[str, Any]:
    """Do :func:`main` in a process of its own, on a cluster that is gone afterwards.

    Args:
        folder: an empty one, with a short path, for the cluster's files.
        task: ``model``, ``asks`` and ``settings`` of the engine.
        slots: how many vLLM workers each of the two nodes has room for.
        environment: further variables for every process.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Without these, Ray would write a token into the user's home, or let everybody in.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # or workers starve beside anything else that runs
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": HEAD,
        **environment,
    }
    with _cluster(folder, slots, environment) as address:
        (folder / "task").write_bytes(pickle.dumps({**task, "address": address}))
        command = [sys.executable, "-m", __name__, str(folder / "task"), str(folder / "result")]
        with contextlib.ExitStack() as stack:
            process = subprocess.Popen(command, env=environment)
            stack.callback(_stop, [process])
            assert process.wait(WAIT) == 0
    return pickle.loads((folder / "result").read_bytes())


@contextlib.contextmanager
def _cluster(folder: Path, slots: int, environment: dict[str, str]) -> Iterator[str]:
    """Start two nodes, and stop them with all their processes; yields the address."""
    processes: list[subprocess.Popen] = []
    try:
        head = ["--head", "--port=0", f"--temp-dir={folder}", "--include-dashboard=false"]
        processes.append(_node(HEAD, head, slots, environment))
        written = folder / "ray_current_cluster"
        _wait(lambda: written.exists() and written.stat().st_size > 0, processes)
        address = written.read_text()
        processes.append(_node(OTHER, [f"--address={address}"], slots, environment))
        yield address
    finally:
        _stop(processes)


def _node(
    address: str, arguments: Sequence[str], slots: int, environment: dict[str, str]
) -> subprocess.Popen:
    sizes = [f"--num-gpus={slots}", "--num-cpus=4", f"--object-store-memory={100 << 20}"]
    ports = ["--min-worker-port=0", "--max-worker-port=0"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={address}", *sizes, *ports, *arguments]
    return subprocess.Popen(command, env={**environment, "VLLM_HOST_IP": address})


def _wait(condition: Callable[[], bool], processes: Sequence[subprocess.Popen] = ()) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.1)


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they started."""
    ours = [psutil.Process(process.pid) for process in processes if process.poll() is None]
    ours += [child for process in ours for child in process.children(recursive=True)]
    for process in processes:
        process.terminate()
    for process in psutil.wait_procs(ours, timeout=10)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in processes:
        process.wait()


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Serve requests on a cluster that runs.

    Returns:
        ``answers`` to the requests, the ``executor``'s class name, and the ``places``: of each worker its node's
        address and its process.
    """
    import ray

    from tests.engine.support.running import evicting_engine, run

    teach_cpu_platform()
    hook = {"worker_process_setup_hook": f"tests.engine.support.ray_nodes.{teach_cpu_platform.__name__}"}
    ray.init(address=task["address"], _node_ip_address=HEAD, runtime_env=hook)
    _wait(lambda: len(ray.nodes()) == 2)
    try:
        settings = {**task["settings"], "distributed_executor_backend": "ray"}
        with evicting_engine(Path(task["model"]), **settings) as llm:
            executor = type(llm.llm_engine.engine_core.engine_core.model_executor).__name__
            places = llm.collective_rpc(_place)
            return {"answers": run(llm, task["asks"]), "executor": executor, "places": places}
    finally:
        ray.shutdown()


def _place(worker: Any) -> tuple[str, int]:
    return os.environ["VLLM_HOST_IP"], os.getpid()


if __name__ == "__main__":
    import tests.conftest
    import tests.engine.conftest  # noqa: F401

    Path(sys.argv[2]).write_bytes(pickle.dumps(main(pickle.loads(Path(sys.argv[1]).read_bytes()))))
