"""Output tokens per second of whole engines in the same KV memory: ``python -m benchmarks.gpu.throughput``.

A Llama of the given size with dummy weights, no tokenizer. Two engines, stock vLLM and eviction, each in a
process of its own on the same card, serve the same requests of random tokens in turns; all requests of a run arrive
together. A process is client, scheduler and worker in one. The ratio is ours over stock's, round by round.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu import common
from benchmarks.harness.measure import Estimate, estimate, paired_ratio, shown
from benchmarks.harness.options import add, budget, policy_name, positive, whole
from benchmarks.harness.sides import LOGS, Outcome, Side, Workload, running
from benchmarks.harness.tables import table

STOCK, OURS = "gpu stock", "gpu eviction"
BLOCK = 16
"""vLLM's block size on CUDA."""
MAX_REQUESTS = 128
"""At once."""


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 128256

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in either dtype of 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """As Hugging Face's ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


MODELS = {
    "8b": Model(4096, 14336, 32, 32, 8, 128),
    "3b": Model(3072, 8192, 28, 24, 8, 128),
    "1b": Model(2048, 8192, 16, 32, 8, 64),
}
LOADS = {"memory-bound": Workload(24, 8192, 512), "decode-heavy": Workload(48, 2048, 1024)}
"""The first has KV memory for six full requests of stock's, the second for seventeen."""


def make_model(size: str, folder: Path) -> Path:
    """Write the configuration of a model without weights; returns its folder."""
    path = folder / f"llama-{size}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[size].config(), indent=1) + "\n")
    return path


def settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Keyword arguments of ``LLM`` of each side."""
    longest = max(load.input_len + load.output_len for load in loads(arguments))
    blocks = -(-arguments.pool_tokens // BLOCK) + 1  # vLLM keeps one for itself
    stock = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "max_model_len": longest,
        "max_num_seqs": MAX_REQUESTS,
        "kv_cache_memory_bytes": blocks * BLOCK * MODELS[arguments.model_size].token_bytes,
        "gpu_memory_utilization": arguments.memory_share,
        "enforce_eager": arguments.eager,
    }
    ours = {
        "kv_eviction": arguments.policy,
        "kv_budget": arguments.budget,
        "kv_eviction_config": {"kernels": arguments.kernels == "on"},
    }
    return {STOCK: stock, OURS: stock | ours}


def loads(arguments: argparse.Namespace) -> list[Workload]:
    """What the sides serve, with as many requests as asked for."""
    chosen = [LOADS[name] for name in arguments.loads]
    if arguments.requests is None:
        return chosen
    return [Workload(arguments.requests, load.input_len, load.output_len) for load in chosen]


def speed(outcome: Outcome) -> float:
    """Output tokens per second."""
    return outcome.output_tokens / outcome.wall


Rounds = list[dict[str, Outcome]]
"""What each side showed, by round."""


def measure(load: Workload, sides: Sequence[Side], rounds: int) -> Rounds:
    """Let the sides serve the load in turns, after a smaller one that warms them up."""
    for side in sides:
        side.run(Workload(2, load.input_len, 8, seed=-1))
    found: Rounds = []
    for number in common.show_progress(range(rounds), f"{load.input_len} in, {load.output_len} out"):
        workload = Workload(load.requests, load.input_len, load.output_len, seed=number)
        turns = sides if number % 2 == 0 else sides[::-1]
        found.append({side.name: side.run(workload) for side in turns})
    return found


def ratio(rounds: Rounds) -> Estimate:
    """Our output tokens per second over stock's."""
    return paired_ratio([speed(one[OURS]) for one in rounds], [speed(one[STOCK]) for one in rounds])


def show(arguments: argparse.Namespace, results: dict[str, Rounds]) -> Table:
    """A row per load and side."""
    mode = "eager" if arguments.eager else "CUDA graphs"
    pool = f"KV memory for {arguments.pool_tokens:,} tokens"
    what = f"{arguments.dtype}, {arguments.policy} {arguments.budget:g}, kernels {arguments.kernels}, {mode}"
    columns = ("tokens/s", "decoding s", "prefill s", "at once", "preempted", "ratio")
    rows = table(f"{arguments.model_size} Llama, {pool}; {what}", ["load", "side"], columns)
    for load, (name, rounds) in zip(loads(arguments), results.items(), strict=True):
        for side in (STOCK, OURS):
            runs = [one[side] for one in rounds]
            rows.add_row(
                f"{name}: {load.requests} x ({load.input_len}, {load.output_len})" if side == STOCK else "",
                side.removeprefix("gpu "),
                shown(estimate([speed(run) for run in runs])),
                f"{estimate([run.decode_seconds for run in runs]).median:.2f}",
                f"{estimate([run.prefill_seconds for run in runs]).median:.2f}",
                f"{max(run.peak_running for run in runs)}",
                f"{max(run.preemptions for run in runs)}",
                shown(ratio(rounds)) if side == OURS else "",
            )
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.parser("throughput", __doc__, rounds=3)
    parser.add_argument("--model-size", choices=MODELS, default="8b", help="default: %(default)s")
    about = "default: %(default)s"
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=about)
    free = "share of the GPU memory that must be free when an engine starts"
    add(
        parser,
        ("policy", policy_name, "ada-snapkv", "of ours"),
        ("budget", budget, 0.2, "--kv-budget"),
        ("pool-tokens", whole, 6 * (8192 + 512), "tokens that the KV memory of each side holds in full"),
        ("threads", whole, 8, "OpenMP threads of each engine"),
        ("requests", whole, None, "of each load (default: its own)"),
        ("memory-share", positive, 0.4, free),
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", default=False, help="no CUDA graphs and no compilation")
    mode.add_argument("--graphs", action="store_false", dest="eager", help="as vLLM does by default")
    about = "ours for decode attention (default: %(default)s)"
    parser.add_argument("--kernels", choices=("on", "off"), default="on", help=about)
    arguments = parser.parse_args(argv)
    for name in arguments.loads:
        if (least := LOADS[name].input_len + LOADS[name].output_len) > arguments.pool_tokens:
            parser.error(f"--pool-tokens must be at least {least}, or {name} does not fit")
    if arguments.memory_share >= 1:
        parser.error(f"--memory-share must be below 1, got {arguments.memory_share:g}")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    common.require_cuda()
    model = make_model(arguments.model_size, LOGS)
    sides: list[Side] = []
    results: dict[str, Rounds] = {}
    with ExitStack() as stack:
        for name, keywords in settings(arguments).items():
            # One after the other: vLLM measures how much memory is free while it starts.
            sides.append(Side(name, model, arguments.threads, **keywords))
            stack.enter_context(running(sides[-1]))
        for name, load in zip(arguments.loads, loads(arguments), strict=True):
            results[name] = measure(load, sides, arguments.rounds)
    content = {
        name: {
            "load": asdict(load),
            "ratio": asdict(ratio(rounds)),
            "rounds": [{side: run.summary() for side, run in one.items()} for one in rounds],
        }
        for load, (name, rounds) in zip(loads(arguments), results.items(), strict=True)
    }
    print(f"written to {common.write('throughput', arguments, content)}")
    common.console().print(show(arguments, results))


if __name__ == "__main__":
    main()
