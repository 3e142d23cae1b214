"""What the eviction of one prompt takes, beside its prefill: ``python -m benchmarks.gpu.eviction``.

Shapes of Llama-3.1-8B, all layers. The engine's own code scores every layer, selects and compacts, over pages of random
numbers. tests/engine/served shows that it keeps the right entries. The host starts ahead of the device, as it is at the
end of a long prefill; where it then asks the device for counts, what that costs is in the time. The prefill is
FlashAttention over the prompt and the matrix products of the layers, one layer measured and taken times their number;
norms, activations and sampling are left out, so a share of it is rather too high.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from statistics import median
from typing import NoReturn

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.gpu.common import (
    FEED_FORWARD,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    PAGE,
    QUERY_HEADS,
    SCALE,
    Contender,
)
from benchmarks.harness.measure import estimate, paired_ratio
from benchmarks.harness.options import budget, policy_name, whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from benchmarks.micro import loop
from benchmarks.micro.loop import Found
from vllm_kvevict.cache import PagedKVCache, PageMemory
from vllm_kvevict.engine.devices import CUDA
from vllm_kvevict.engine.parameters import policy_config
from vllm_kvevict.kernels.window_attention import window_attention
from vllm_kvevict.kernels.write_entries import write_entries
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.eviction import QueryRows, ResidentRequest
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import LayerStep, Sources
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import eviction_of, plan_of, schedule_for

TARGET, TARGET_LENGTH = 0.02, 32768
"""The largest share of the prefill, at this length."""
AHEAD_MS = 50.0
ATTENTION = "attention"
LAST_QUERIES = 64
"""Of a prompt, more than any policy's window."""
MATRICES = {
    "q, k, v": (HIDDEN, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "output": (QUERY_HEADS * HEAD_DIM, HIDDEN),
    "gate and up": (HIDDEN, 2 * FEED_FORWARD),
    "down": (FEED_FORWARD, HIDDEN),
}
"""Of one layer."""
KNOWN = {"q_window", "values"}
"""What policies may read that are measured: queries and the cache, not the model's weights or positions."""
COMMAND, HAS_DTYPE = "gpu.eviction", False
OPTIONS = (
    ("rounds", whole, 10, "timings of each contender"),
    ("lengths", whole, [8192, 32768], "tokens of the prompts"),
    ("policies", policy_name, ["snapkv", "ada-snapkv", "lava"], "that evict"),
    ("budget", budget, 0.2, "--kv-budget"),
    ("layers", whole, common.LAYERS, "of the model"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    for name in arguments.policies:
        needs = policy_config(name, arguments.budget).needs
        if name == "full" or not schedule_for(name).holds_whole_prompt or not needs <= KNOWN:
            return f"--policies {name}: only policies that read {' and '.join(sorted(KNOWN))} are measured"
    return None


class Prompt:
    """One prompt's cache, and the engine's evictor over it.

    Args:
        tokens: of the prompt.
        layers: of the model.
    """

    def __init__(self, tokens: int, layers: int):
        self.tokens, self.layers = tokens, layers
        pages = layers * KV_HEADS * -(-tokens // PAGE)
        self.storage = common.random_numbers(pages, common.PAGE_ELEMENTS)

        def write(storage: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            write_entries(storage, PAGE, keys.unsqueeze(1), values.unsqueeze(1), slots)

        def received(query: Tensor, table: Tensor, n: int, scale: float, softcap: float, rows: str) -> Tensor:
            return window_attention(query, self.storage, PAGE, table, n, scale, softcap, rows)

        layout = replace(common.LAYOUT, rows=KV_HEADS)
        memory = PageMemory.probe(self.storage, layout, write)
        self.cache = PagedKVCache(memory, num_layers=layers, max_requests=1, triton=True)

        def none(*_: int) -> NoReturn:
            raise NotImplementedError(f"only {KNOWN} are there")

        sources = Sources(self.cache, none, none, received)
        self.evictor = Evictor(self.cache, 0, layers, None, sources, CUDA.is_asynchronous)
        self.request_slot = self.cache.open()
        self.queries = common.random_numbers(layers, LAST_QUERIES, QUERY_HEADS, HEAD_DIM)

    def refill(self) -> None:
        """Let the request hold the whole prompt again, whatever the pages hold."""
        self.cache.close([self.request_slot])
        self.request_slot = self.cache.open()
        self.cache.extend([self.request_slot], [self.tokens])

    def evict(self, config: EvictionConfig) -> None:
        """What the engine does at the end of the last step of a prefill, layer by layer."""
        window = config.window_for(self.tokens)
        resident = ResidentRequest(Admission("", 1, plan_of(config, self.tokens)), self.request_slot)
        eviction = eviction_of(self.evictor, resident)
        assert eviction is not None
        resident.tokens = self.tokens
        rows = QueryRows(slice(0, window), slice(0, window), window, True, None)
        for layer in range(self.layers):
            eviction.after_attention(LayerStep(layer, self.queries[layer, -window:], SCALE, 0.0), rows)
        self.evictor.take_news()

    def contender(self, config: EvictionConfig) -> Contender:
        """The eviction."""
        return Contender(
            config.policy, lambda: self.evict(config), prepare=self.refill, ahead_ms=AHEAD_MS, waits=True
        )


class Prefill:
    """The parts of one layer's prefill of a prompt."""

    def __init__(self, tokens: int, attend: common.FlashAttention):
        self.tokens, self.attend = tokens, attend
        blocks = -(-tokens // common.STOCK_PAGE)
        self.memory = common.random_numbers(blocks, common.STOCK_PAGE * KV_HEADS * 2 * HEAD_DIM)
        self.query = common.random_numbers(tokens, QUERY_HEADS, HEAD_DIM)
        self.output = torch.full_like(self.query, torch.nan)
        self.prompt = common.stock_sequences(1, tokens, tokens)
        self.plan = attend.plan(self.prompt)

    def attention(self) -> None:
        """Causal attention over stock's pages."""
        self.attend(self.query, common.stock_pages(self.memory), self.prompt, self.output, self.plan)

    def check(self) -> None:
        """Compare some rows with plain torch."""
        self.attention()
        rows = torch.linspace(0, self.tokens - 1, 16).long()
        places, lengths = rows.to(self.query.device), [row + 1 for row in rows.tolist()]
        table = self.prompt.block_table.expand(len(rows), -1)
        wanted = common.expected(self.query[places], common.stock_pages(self.memory), table, lengths)
        common.check("prefill attention", self.output[places], wanted)

    def contenders(self) -> list[Contender]:
        """Attention and every matrix product."""

        def product(name: str) -> Callable[[], object]:
            inner, outer = MATRICES[name]
            left = common.random_numbers(self.tokens, inner)
            right = common.random_numbers(outer, inner).t()
            return lambda: torch.matmul(left, right)

        found = [Contender(ATTENTION, self.attention)]
        return found + [Contender(name, product(name)) for name in MATRICES]


def prefill_ms(times: Mapping[str, common.Times], layers: int) -> list[float]:
    """Milliseconds of all layers, by round."""
    rounds = zip(*(times[name].ms for name in (ATTENTION, *MATRICES)), strict=True)
    return [layers * sum(parts) for parts in rounds]


def time_length(
    tokens: int, layers: int, configs: Sequence[EvictionConfig], rounds: int, timer: common.Timer
) -> dict[str, common.Times]:
    """Time evictions and the parts of the prefill in turns."""
    prompt, prefill = Prompt(tokens, layers), Prefill(tokens, common.FlashAttention())
    prefill.check()
    contenders = prefill.contenders() + [prompt.contender(config) for config in configs]
    return common.take_turns(contenders, rounds, timer)


def measure(arguments: argparse.Namespace) -> Found:
    """Every length."""
    configs = [policy_config(policy, arguments.budget) for policy in arguments.policies]
    title = f"eviction of one prompt to {arguments.budget:g}, {arguments.layers} layers"
    columns = ("evicting ms [95 %]", "prefill ms", "of prefill [95 %]")
    rows, lengths, notes, targets = table(title, ["tokens", "policy"], columns), [], [], []
    with common.device() as timer:
        for tokens in track(arguments.lengths, "lengths"):
            times = time_length(tokens, arguments.layers, configs, arguments.rounds, timer)
            notes += common.late_notes([*times.values()])
            whole, policies = prefill_ms(times, arguments.layers), {}
            for policy in arguments.policies:
                ms = times[policy].ms
                took, share = estimate(ms), paired_ratio(ms, whole)
                rows.add_row(str(tokens), policy, str(took), f"{median(whole):.4g}", str(share))
                policies[policy] = {"ms": asdict(took), "of_prefill": asdict(share)}
                if tokens == TARGET_LENGTH:
                    name = f"{policy}, {tokens} tokens, share of the prefill"
                    targets.append(Target(name, share, TARGET, at_most=True))
            raw = {name: asdict(of) for name, of in times.items()}
            prefill = asdict(estimate(whole))
            lengths.append({"tokens": tokens, "prefill_ms": prefill, "policies": policies, "raw": raw})
    return Found({"lengths": lengths}, [rows], targets=targets, notes=notes, card=common.card())


if __name__ == "__main__":
    sys.exit(loop.run("gpu/eviction", import_module("benchmarks.gpu.eviction")))
