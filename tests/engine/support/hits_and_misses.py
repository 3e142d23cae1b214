"""Every request that begins with a cached prefix, against the same request that reads all of its prompt, alone.

    python -m tests.engine.support.hits_and_misses

starts an engine for each combination of model runner, ranks, chunk size and pool. It asks about one document for each
policy, three questions at once, then the same again. And it aborts the request that reads a document, once after each
step, while another one waits for it. All answers are greedy and in fp32, and must not differ in a single token.
"""

import argparse
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.models import make_model
from tests.engine.support import v2_runner
from tests.engine.support.running import VOCAB, Ask, evicting_engine, num_preemptions, run
from vllm_kvevict.policies import available

POLICIES = [policy for policy in available() if policy != "full"]
BASE: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}
TIGHT: dict[str, Any] = {
    # The pool holds one request of max_model_len; vLLM sets a block aside.
    "num_gpu_blocks_override": 9,
    "eviction": {"decode_reserve": 8},
}
RUNNERS = ("V1", "V2")
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_KVEVICT_CHECK": "1",
    "OMP_NUM_THREADS": "1",  # with more, workers hang that are forked from a process in which an engine has run
}
"""Of engines within their process, as in this folder's tests; workers compare page counts and checksums."""
CHILD = """
import os, sys
from benchmarks.harness.models import make_model
from tests.engine.support import v2_runner
if sys.argv[1] == "V2":
    v2_runner.let_triton_interpret()  # before vLLM is imported
from tests.engine.support import hits_and_misses
wrong = hits_and_misses.child(*sys.argv[1:])
os._exit(wrong > 0)  # interpreters of Triton list what they leak at their ordinary end
"""


@dataclass
class Question(Ask):
    """A request whose first ``prefix_len`` tokens depend on ``seed`` alone, and the others on ``question``."""

    question: int = 0

    @property
    def prompt(self) -> list[int]:
        assert self.prefix_len is not None
        document, question = random.Random(self.seed), random.Random(f"{self.seed} {self.question}")
        chosen = [document.randrange(8, VOCAB) for _ in range(self.prefix_len)]
        return chosen + [question.randrange(8, VOCAB) for _ in range(self.length - self.prefix_len)]


def questions(policy: str, seed: int, prefix_len: int = 200, max_tokens: int = 12) -> list[Question]:
    """Three about one document; the last has a single token, and one ends a page."""
    lengths = (prefix_len + 20, prefix_len + 56, prefix_len + 1)
    return [
        Question(length, policy, 0.3, prefix_len, max_tokens, seed, question)
        for question, length in enumerate(lengths)
    ]


def metric(llm: Any, name: str) -> int:
    """A counter or gauge, summed over ranks."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def aborted_after(llm: Any, first: Question, second: Question, steps: int) -> tuple[list[int], bool]:
    """What the second of two requests says when the first is aborted after so many steps, and whether it was."""
    engine = llm.llm_engine
    for name, ask in (("first", first), ("second", second)):
        engine.add_request(name, {"prompt_token_ids": ask.prompt}, ask.sampling(logits=False))
    tokens: dict[str, list[int]] = {}
    was_aborted = False
    for step in range(1000):
        if step == steps and "first" not in tokens:
            engine.abort_request(["first"])
            was_aborted = True
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            return tokens["second"], was_aborted
    raise AssertionError("the second request does not end")


@dataclass(frozen=True)
class Server:
    """One combination.

    Attributes:
        chunk: ``--max-num-batched-tokens``.
        is_tight: whether the pool holds one request of the longest kind.
    """

    runner: str
    tensor: int
    pipeline: int
    chunk: int
    is_tight: bool = False

    def __str__(self) -> str:
        pool = ", tight pool" if self.is_tight else ""
        return f"{self.runner}, TP {self.tensor} x PP {self.pipeline}, steps of {self.chunk} tokens{pool}"

    def settings(self) -> dict[str, Any]:
        """Keywords of the engine."""
        return {
            **BASE,
            **(TIGHT if self.is_tight else {}),
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "max_num_batched_tokens": self.chunk,
            "enable_prefix_caching": True,
        }


def servers(runner: str) -> list[Server]:
    """All combinations of a runner; of V2, which an interpreter runs here, only the ends of each range."""
    every = list(product((1, 2), (1, 2)))
    chunks, layouts = ((64, 128, 1024), every) if runner == "V1" else ((64, 1024), [(1, 1), (2, 2)])
    roomy = [Server(runner, tp, pp, chunk) for tp, pp in every for chunk in chunks]
    return roomy + [Server(runner, tp, pp, 128, is_tight=True) for tp, pp in layouts]


@dataclass
class Outcome:
    """What a server showed.

    Attributes:
        answers: that were compared.
        hits: tokens that were found in the prefix cache.
        aborts: producers that were aborted while another request was there.
        preemptions: of requests.
        drops: of cached prefixes, to make room.
        wrong: what differed.
    """

    answers: int = 0
    hits: int = 0
    aborts: int = 0
    preemptions: int = 0
    drops: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, ask: Question, tokens: Sequence[int], reference: "Reference") -> None:
        """Note whether an answer is what it should be."""
        self.answers += 1
        if list(tokens) != reference[name_of(ask)]:
            self.wrong.append(name_of(ask))

    def __str__(self) -> str:
        found = f"{self.answers} answers, {self.hits} tokens found, {self.aborts} producers aborted"
        return (
            f"{found}, {self.preemptions} preemptions, {self.drops} prefixes dropped; {len(self.wrong)} wrong"
        )


def name_of(ask: Question) -> str:
    """What an ask is called in reports."""
    return f"{ask.policy}, question {ask.question}, {ask.max_tokens} tokens"


Reference = dict[str, list[int]]
"""By the name of an ask what it says when it reads its whole prompt, alone, on one rank of the V1 runner."""


def read_alone(model: Path) -> Reference:
    """Ask everything without a prefix cache, one after the other."""
    asks = [*all_asks(False), *all_asks(True), *(second for _, second in pairs())]
    with evicting_engine(model, **BASE) as llm:
        return {name_of(ask): run(llm, [ask], recorded=False)[0].tokens for ask in asks}


def all_asks(is_tight: bool) -> list[Question]:
    """Three questions for each policy; long answers where requests are to preempt each other."""
    prefix_len, max_tokens = (300, 150) if is_tight else (200, 12)
    return [
        ask
        for seed, policy in enumerate(POLICIES)
        for ask in questions(policy, seed, prefix_len - seed, max_tokens)
    ]


def pairs() -> list[tuple[Question, Question]]:
    """Two questions for each policy, of which the first is aborted."""
    asked = [questions(policy, 100 + seed, 200 - seed, 4) for seed, policy in enumerate(POLICIES)]
    return [(first, second) for first, second, _ in asked]


def play(server: Server, model: Path, reference: Reference) -> Outcome:
    """Ask one server everything."""
    outcome = Outcome()
    asks = all_asks(server.is_tight)
    with evicting_engine(model, **server.settings()) as llm:
        for _ in range(2):
            for ask, answer in zip(asks, run(llm, asks, recorded=False), strict=True):
                outcome.compare(ask, answer.tokens, reference)
        if not server.is_tight:
            for first, second in pairs():
                _abort_at_every_step(llm, first, second, reference, outcome)
        outcome.hits = metric(llm, "prefix_cache_hits")
        outcome.preemptions = num_preemptions(llm)
        outcome.drops = metric(llm, "kv_eviction_cache_drops")
    if not outcome.hits or not (outcome.preemptions if server.is_tight else outcome.aborts):
        outcome.wrong.append("nothing was found, preempted or aborted: there was nothing to compare")
    return outcome


def _abort_at_every_step(
    llm: Any, first: Question, second: Question, reference: Reference, outcome: Outcome
) -> None:
    steps, was_aborted = 1, True
    while was_aborted:
        llm.reset_prefix_cache()
        tokens, was_aborted = aborted_after(llm, first, second, steps)
        outcome.compare(second, tokens, reference)
        outcome.aborts += was_aborted
        steps += 1


def child(runner: str, folder: str, only: str) -> int:
    """Play every server of a runner whose description contains ``only``; how many answers were wrong.

    The first child leaves its model and what it says alone in ``folder`` for the second.
    """
    model, said = Path(folder) / "model", Path(folder) / "reference.pickle"
    if not said.exists():
        make_model(model, "llama", heads=8, kv_heads=4, layers=4)
        said.write_bytes(pickle.dumps(read_alone(model)))
    reference: Reference = pickle.loads(said.read_bytes())
    wrong = 0
    for server in servers(runner):
        if only not in str(server):
            continue
        started = time.perf_counter()
        outcome = play(server, model, reference)
        print(f"{server}: {outcome} ({time.perf_counter() - started:.0f} s)", flush=True)
        for name in outcome.wrong:
            print(f"  wrong: {name}", flush=True)
        wrong += len(outcome.wrong)
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Each runner in a process of its own, since vLLM chooses it once per process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only servers whose description has this in it"
    )
    args = parser.parse_args(argv)
    if not any(args.only in str(server) for runner in RUNNERS for server in servers(runner)):
        parser.error(f"no server's description contains {args.only!r}")
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        for runner in RUNNERS:
            own = v2_runner.ENVIRONMENT if runner == "V2" else {}
            command = [sys.executable, "-c", CHILD, runner, folder, args.only]
            environment = {**os.environ, **ENVIRONMENT, **own}
            codes.append(subprocess.run(command, cwd=ROOT, env=environment).returncode)
            if codes[-1]:
                break
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
