"""Engines to compare, each in a process of its own that waits for the parent to tell it to work."""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from vllm_kvevict.schedules.reports import Report

VOCAB = 512
LOGS = Path(__file__).parents[1] / "out"
FIRST_WORD = 8
"""Ids below are special tokens of the benchmark models."""


@dataclass(frozen=True)
class Workload:
    """Requests of random tokens that arrive together; every request of every seed is different."""

    requests: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids of every request."""
        choose = random.Random(f"{self}")
        return [
            [choose.randrange(FIRST_WORD, VOCAB) for _ in range(self.input_len)] for _ in range(self.requests)
        ]


@dataclass
class Outcome:
    """What running a workload took and showed.

    Attributes:
        wall, cpu: seconds; CPU seconds of all threads of the process.
        output_tokens: generated.
        steps: (seconds, prompt tokens, requests) of each engine step.
        evictions: (decision seconds, compaction seconds) of each evicted request.
    """

    wall: float
    cpu: float
    output_tokens: int
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    evictions: list[tuple[float, float]] = field(default_factory=list)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of the steps that computed prompt tokens."""
        return sum(seconds for seconds, prefill, _ in self.steps if prefill)

    @property
    def decode_seconds(self) -> float:
        """Seconds of the steps that computed output tokens only."""
        return sum(seconds for seconds, prefill, _ in self.steps if not prefill)

    def summary(self) -> dict[str, Any]:
        """For the record: everything but the single steps."""
        parts = {"prefill_seconds": self.prefill_seconds, "decode_seconds": self.decode_seconds}
        return asdict(self) | {"steps": len(self.steps), **parts}


class Side:
    """One engine in its own process.

    Args:
        name: how tables call it.
        model: folder of the model.
        threads: OpenMP threads.
        settings: keyword arguments of ``vllm.LLM``.
    """

    def __init__(self, name: str, model: Path, threads: int, **settings: Any):
        self.name = name
        LOGS.mkdir(exist_ok=True)
        self.log = LOGS / f"{name.replace(' ', '-')}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(self.log), str(model), settings), name=name, daemon=True
        )
        with mock.patch.dict(os.environ, _environment(threads)):
            self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Return when the engine has started."""
        self.receive()

    def run(self, workload: Workload, **sampling: Any) -> Outcome:
        """Run all requests of a workload to their end.

        Args:
            sampling: further fields of the requests' ``SamplingParams``.
        """
        return self.call(_run, workload, sampling)

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Let the engine's process do something and return its answer, which must not be a string.

        Args:
            work: a function of a module, called with the engine (:class:`Engine`) and the arguments.
        """
        self.send(work, *arguments)
        return self.receive()

    def send(self, work: Callable[..., Any], *arguments: Any) -> None:
        """The first half of :meth:`call`, so that several sides can work at the same time."""
        self._pipe.send((work, arguments))

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def receive(self) -> Any:
        """The second half of :meth:`call`. Raises RuntimeError if the engine failed."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the engine process of {self.name} ended, see {self.log}") from None
        if isinstance(answer, str):
            raise RuntimeError(f"the engine of {self.name} failed, see {self.log}: {answer}")
        return answer


@contextlib.contextmanager
def running(*sides: Side) -> Iterator[None]:
    """Wait until all engines have started, and end them at the end."""
    try:
        for side in sides:
            side.wait()
        yield
    finally:
        for side in sides:
            side.close()


def _environment(threads: int) -> dict[str, str]:
    """What vLLM gives its CPU workers, for a process that is worker and engine in one."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": preloads(),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "VLLM_KVEVICT_CHECK": "0",
    }


def preloads() -> str:
    """Libraries that vLLM preloads into its workers, as ``LD_PRELOAD`` lists them."""
    torch, vllm = (Path(importlib.util.find_spec(name).origin).parent for name in ("torch", "vllm"))  # type: ignore
    found = [*(torch / "lib").glob("libgomp*.so*"), *(torch.parent / "torch.libs").glob("libgomp*.so*")][:1]
    found += [*(vllm / "libs").glob("libtcmalloc*.so*")][:1]
    return ":".join(str(path) for path in found)


class Probe:
    """Watches the scheduler and the engine's steps from inside."""

    def __init__(self, llm: Any):
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.reset()
        self._watch(core)
        ledger = core.scheduler.kv_cache_manager
        if hasattr(ledger, "on_report"):
            self._watch_reports(ledger)

    def reset(self) -> None:
        self.steps: list[tuple[float, int, int]] = []
        self.evictions: list[tuple[float, float]] = []

    def _watch(self, core: Any) -> None:
        schedule, step = core.scheduler.schedule, core.step_fn
        now: list[tuple[int, int]] = []

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            prefill = 0
            for name, count in output.num_scheduled_tokens.items():
                request = self.scheduler.requests.get(name)  # not there: a probe of take
                # num_computed_tokens was advanced by what was scheduled.
                if request and request.num_computed_tokens - count < request.num_prompt_tokens:
                    prefill += count
            now.append((prefill, len(output.num_scheduled_tokens)))
            return output

        def watched_step() -> Any:
            started = time.perf_counter()
            result = step()
            seconds = time.perf_counter() - started
            if now:
                self.steps.append((seconds, *now.pop()))
            return result

        core.scheduler.schedule, core.step_fn = watched_schedule, watched_step

    def _watch_reports(self, ledger: Any) -> None:
        on_report = ledger.on_report

        def watched(rank: int, request_id: str, report: "Report") -> Any:
            if report.part is not None:
                self.evictions.append((report.part.decision_seconds, report.part.compaction_seconds))
            return on_report(rank, request_id, report)

        ledger.on_report = watched


@dataclass
class Engine:
    """What work in a child gets: vLLM's ``LLM``, and who watches it."""

    llm: Any
    probe: Probe


def _run(engine: Engine, workload: Workload, sampling: dict[str, Any]) -> Outcome:
    """Run all requests of a workload to their end."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=workload.output_len, temperature=0, ignore_eos=True, detokenize=False, **sampling
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts()]
    probe = engine.probe
    probe.reset()
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Outcome(wall, cpu, produced, probe.steps, probe.evictions)


def _serve(pipe: Connection, log: str, model: str, settings: dict[str, Any]) -> None:
    """The child: an engine that works until it is told to end."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        import vllm_kvevict.engine  # noqa: F401, I001  (adds the arguments that settings may hold)
        from vllm import LLM

        llm = LLM(model, **settings)
        engine = Engine(llm, Probe(llm))
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            work, arguments = order
            pipe.send(work(engine, *arguments))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
