"""vLLM's V2 model runner, the default on GPUs, on a machine without one: in a process of its own.

What the runner needs on a CPU vLLM brings itself, except for Triton. Triton comes with an interpreter but without the
CPU backend that vLLM looks for before it uses Triton there, so an entry is made in Triton's list of backends.

    python -m tests.engine.support.v2_runner CASES RESULTS

reads pickled keywords of :func:`answers`, one dictionary a case, and pickles what it returns.
"""

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # read when Triton is imported: its own library is made of kernels too
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
RUNNER = "vllm.v1.worker.gpu.model_runner"


class NewProcess:
    """Runs cases while the caller goes on."""

    def __init__(self, folder: Path, cases: Sequence[dict[str, Any]]):
        self.results, self.log = folder / "results.pickle", folder / "log.txt"
        sent = folder / "cases.pickle"
        sent.write_bytes(pickle.dumps(list(cases)))
        environment = {**os.environ, **ENVIRONMENT}
        command = [sys.executable, "-m", "tests.engine.support.v2_runner", str(sent), str(self.results)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def result(self) -> list[Any]:
        """What the cases returned, once all are done."""
        code = self.process.wait(timeout=600)
        assert code == 0, self.log.read_text()[-8000:]
        return pickle.loads(self.results.read_bytes())

    def stop(self) -> None:
        """End it if it still runs."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def _engine(ahead: bool, gpu: bool, **settings: Any) -> Iterator[Any]:
    """An engine on the V2 runner that leaves no page behind.

    Args:
        ahead: schedule a step while another runs, as on GPUs; vLLM's CPU platform turns that off.
        gpu: use the pages of a GPU, with our Triton kernels and vLLM's in the interpreter.
        settings: of :func:`tests.engine.support.running.evicting_engine`.
    """
    from vllm.platforms.cpu import CpuPlatform

    from tests.engine.support.emulated import emulated_gpu
    from tests.engine.support.running import evicting_engine

    check = CpuPlatform.check_and_update_config

    def keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = ahead

    CpuPlatform.check_and_update_config = staticmethod(keep)  # type: ignore[method-assign,assignment]
    try:
        pages = emulated_gpu(is_attention_interpreted=True) if gpu else contextlib.nullcontext()
        with pages, evicting_engine(**settings) as llm:
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            assert type(scheduler).__name__ == ("AsyncEvictionScheduler" if ahead else "EvictionScheduler")
            yield llm
            for runner, pages in llm.collective_rpc(_left):
                assert (runner, pages) == (RUNNER, 0)
    finally:
        CpuPlatform.check_and_update_config = check  # type: ignore[method-assign]


def _left(worker: Any) -> tuple[str, int]:
    """In the worker: where its runner's code is from, and what requests hold once those that finished are closed."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_kvevict.engine.worker.runtime import get_runtime

    runtime = get_runtime()
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = set(runtime.residents)
    runtime.begin_step(step)
    held = runtime.rank.cache.physical_pages - sum(runtime.rank.prefixes.holdings().values())
    return type(worker.model_runner).__mro__[1].__module__, held


def answers(
    batches: list[list[Any]],
    ahead: bool = False,
    gpu: bool = False,
    logits: bool = False,
    aborting: tuple[list[Any], list[int]] | None = None,
    **settings: Any,
) -> tuple[list[Any], int, int, Any]:
    """What :func:`tests.engine.support.running.run` returns for each batch on one engine, its preemptions and tokens
    found in the prefix cache, and then what ``run_aborted`` there returns for ``aborting``."""
    from tests.engine.support.running import metric, num_preemptions, run, run_aborted

    with _engine(ahead, gpu, **settings) as llm:
        llm.collective_rpc(_warm_up)
        results = []
        for asks in batches:
            results.append(run(llm, asks, logits=logits))
            # The runner still knows the last requests, by indices that dummy rows have too.
            llm.collective_rpc(_dummy_runs)
        found = metric(llm, "prefix_cache_hits")
        return results, num_preemptions(llm), found, aborting and run_aborted(llm, *aborting)


def _warm_up(worker: Any) -> None:
    """In the worker: what a GPU worker does at start-up, but for kernels that Triton cannot interpret."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu import warmup

    worker.model_runner.profile_run()
    _dummy_runs(worker)
    with mock.patch.object(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)):
        steps = worker.model_runner, worker.execute_model, lambda grammar: worker.sample_tokens(None)
        warmup.warmup_kernels(*steps)
        warmup.run_mixed_prefill_decode_warmup(*steps, 20)


def _dummy_runs(worker: Any) -> None:
    """In the worker: batches that serve no request, as in idle steps and for the capture of graphs."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    runner = worker.model_runner
    runner._dummy_run(20)
    worker.execute_dummy_batch()
    for full in (False, True):
        prepare_inputs_to_capture(
            4,
            4,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=full,
        )


def let_triton_interpret() -> None:
    """Let vLLM find a CPU backend of Triton; before anything imports Triton's kernels."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)  # type: ignore


def main() -> None:
    gc.disable()
    from tests.engine.support import running  # noqa: F401
    from tests.engine.support.quick_starts import quick_starts
    from tests.interpreting import quick_launches

    # What was imported stays. The interpreter makes so many objects that it would be looked through again and again.
    gc.freeze()
    gc.enable()
    cases, results = map(Path, sys.argv[1:])
    with quick_starts(), quick_launches():
        done = [answers(**settings) for settings in pickle.loads(cases.read_bytes())]
    results.write_bytes(pickle.dumps(done))


if __name__ == "__main__":
    let_triton_interpret()
    main()
