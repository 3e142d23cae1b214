"""What the eviction of one prompt takes, beside its prefill: ``python -m benchmarks.gpu.eviction``.

Shapes of Llama-3.1-8B, all layers. The engine's own code scores every layer, selects and compacts, over pages
of random numbers; its answers are compared with plain torch first. The host starts ahead of the device, as it is at the
end of a long prefill; where it then asks the device for counts, what that costs is in the time. The prefill is
FlashAttention over the prompt and the matrix products of the layers, one layer measured and taken times their number;
norms, activations and sampling are left out, so a share of it is rather too high.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.gpu.attention import expected
from benchmarks.gpu.common import (
    FEED_FORWARD,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PAGE,
    PAGE_ELEMENTS,
    QUERY_HEADS,
    SCALE,
    STOCK_PAGE,
    Contender,
    FlashAttention,
    Timer,
    Times,
    WrongResult,
)
from benchmarks.harness.measure import Estimate, estimate, shown
from benchmarks.harness.options import add, budget, policy_name, whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.engine.devices import CUDA
from vllm_kvevict.engine.parameters import policy_config
from vllm_kvevict.kernels.window_attention import window_attention
from vllm_kvevict.kernels.write_entries import write_entries
from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide
from vllm_kvevict.schedules.eviction import QueryRows, ResidentRequest
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import LayerStep, Sources
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import eviction_of, plan_of, schedule_for

TARGET, TARGET_LENGTH = 0.02, 32768
"""The largest share of the prefill, at this length."""
AHEAD_MS = 50.0
LAST_QUERIES = 64
"""Of a prompt, more than any policy's window."""
CHECKED_TOKENS, CHECKED_LAYERS = 2048, 2
AGREEMENT = 0.995
"""Of the chosen entries, at least: sums in another order move a few across the cut."""
MATRICES = {
    "q, k, v": (HIDDEN, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "output": (QUERY_HEADS * HEAD_DIM, HIDDEN),
    "gate and up": (HIDDEN, 2 * FEED_FORWARD),
    "down": (FEED_FORWARD, HIDDEN),
}
"""Of one layer."""


class Prompt:
    """One prompt's cache, and the engine's evictor over it.

    Args:
        tokens: of the prompt.
        layers: of the model.
    """

    def __init__(self, tokens: int, layers: int):
        self.tokens, self.layers = tokens, layers
        pages = layers * KV_HEADS * -(-tokens // PAGE)
        self.storage = common.random_numbers(pages, PAGE_ELEMENTS)

        def write(storage: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
            write_entries(storage, PAGE, keys.unsqueeze(1), values.unsqueeze(1), slots)

        def received(query: Tensor, table: Tensor, n: int, scale: float, softcap: float, rows: str) -> Tensor:
            return window_attention(query, self.storage, PAGE, table, n, scale, softcap, rows)

        self.cache = PagedKVCache(
            self.storage,
            num_layers=layers,
            num_kv_heads=KV_HEADS,
            page_size=PAGE,
            max_requests=1,
            write=write,
            triton=True,
        )

        def none(*_: int) -> NoReturn:
            raise NotImplementedError(
                "policies that read the model's weights or positions are not measured here"
            )

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

    def contenders(self, config: EvictionConfig) -> list[Contender]:
        """The eviction, and all of it but the compaction."""

        def without_compaction() -> None:
            compact = self.cache.compact
            self.cache.compact = lambda *arguments: 0  # type: ignore[method-assign]
            try:
                self.evict(config)
            finally:
                self.cache.compact = compact  # type: ignore[method-assign]

        return [
            Contender(name, run, self.refill, AHEAD_MS, waits=True)
            for name, run in (
                (config.policy, lambda: self.evict(config)),
                (deciding(config.policy), without_compaction),
            )
        ]


def deciding(policy: str) -> str:
    """The contender that evicts but moves nothing."""
    return f"{policy}, deciding"


def check_eviction(config: EvictionConfig, tokens: int, layers: int) -> None:
    """Compare what a smaller prompt keeps with what the policy says in plain torch on the host, and where it lies.

    Raises:
        WrongResult: other entries were kept, or entries are lost.
    """
    prompt = Prompt(tokens, layers)
    prompt.refill()
    cache, compact = prompt.cache, prompt.cache.compact
    before = [
        [read(prompt.request_slot, layer, tokens).cpu() for read in (cache.read_keys, cache.read_values)]
        for layer in range(layers)
    ]
    chosen: list[Tensor] = []

    def recording(
        request_slot: int, layer: int, kept: Sequence[Tensor], first: IntArray | None = None
    ) -> int:
        chosen.extend(positions.cpu() for positions in kept)
        return compact(request_slot, layer, kept, first)

    cache.compact = recording  # type: ignore[method-assign]
    prompt.evict(config)
    queries = prompt.queries[:, -config.window_for(tokens) :].cpu()
    inputs = [
        LayerInputs(query.transpose(0, 1), keys, values, SCALE)
        for query, (keys, values) in zip(queries, before, strict=True)
    ]
    wanted = [positions for heads in decide(config, inputs) for positions in heads]
    shared = sum(int(torch.isin(a, b).sum()) for a, b in zip(chosen, wanted, strict=True))
    sizes = [sum(len(positions) for positions in one) for one in (chosen, wanted)]
    if shared < AGREEMENT * max(sizes):
        raise WrongResult(
            f"{config.policy}: {shared} of {sizes[0]} entries kept are among the right {sizes[1]}"
        )
    for row, kept in enumerate(chosen):
        layer, head = divmod(row, KV_HEADS)
        heads, entries = (
            x.to(prompt.storage.device) for x in (torch.full_like(kept, head), torch.arange(len(kept)))
        )
        for now, then in zip(
            cache.gather(prompt.request_slot, layer, heads, entries), before[layer], strict=True
        ):
            common.check(f"{config.policy}, entries kept", now.cpu(), then[head, kept], tolerance=0)


class Prefill:
    """The parts of one layer's prefill of a prompt."""

    def __init__(self, tokens: int, attend: FlashAttention):
        self.tokens, self.attend = tokens, attend
        blocks = -(-tokens // STOCK_PAGE)
        numbers = STOCK_PAGE * KV_HEADS * 2 * HEAD_DIM
        self.memory = common.random_numbers(blocks, numbers)
        self.query = common.random_numbers(tokens, QUERY_HEADS, HEAD_DIM)
        self.output = torch.full_like(self.query, torch.nan)
        device = self.memory.device
        self.table = torch.randperm(blocks, dtype=torch.int32, device=device)[None]
        self.starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.lengths = self.starts[1:]
        self.plan = attend.plan(1, tokens, tokens, self.lengths, self.starts)

    def attention(self) -> None:
        """Causal attention over stock's pages."""
        keys, values = common.stock_pages(self.memory)
        self.attend(
            q=self.query,
            k=keys,
            v=values,
            out=self.output,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.tokens,
            seqused_k=self.lengths,
            max_seqlen_k=self.tokens,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=self.plan,
        )

    def check(self) -> None:
        """Compare some rows with plain torch."""
        self.attention()
        rows = torch.linspace(0, self.tokens - 1, 16).long()
        places, lengths = rows.to(self.query.device), [row + 1 for row in rows.tolist()]
        table = self.table.expand(len(rows), -1)
        wanted = expected(self.query[places], *common.stock_pages(self.memory), table, lengths)
        common.check("prefill attention", self.output[places], wanted)

    def contenders(self) -> list[Contender]:
        """Attention and every matrix product."""

        def product(name: str) -> Callable[[], object]:
            inner, outer = MATRICES[name]
            left = common.random_numbers(self.tokens, inner)
            right = common.random_numbers(outer, inner).t()
            return lambda: torch.matmul(left, right)

        found = [Contender("attention", self.attention)]
        return found + [Contender(name, product(name)) for name in MATRICES]


@dataclass
class Length:
    """What was measured at one prompt length.

    Attributes:
        tokens, layers: of the prompt and the model.
        times: of the parts of one layer's prefill, and of the evictions.
    """

    tokens: int
    layers: int
    times: dict[str, Times]

    def seconds(self, *names: str) -> list[float]:
        """Of all layers and these parts of the prefill, by round."""
        rounds = zip(*(self.times[name].ms for name in names), strict=True)
        return [self.layers * sum(parts) / 1e3 for parts in rounds]

    def share(self, policy: str, of: list[float]) -> Estimate:
        """An eviction's share of some seconds, by round."""
        return estimate([ms / 1e3 / whole for ms, whole in zip(self.times[policy].ms, of, strict=True)])

    def summary(self, policies: Sequence[str]) -> dict[str, Any]:
        """For the record."""
        attention, prefill = self.seconds("attention"), self.seconds("attention", *MATRICES)
        return {
            "tokens": self.tokens,
            "attention_ms": asdict(estimate([1e3 * x for x in attention])),
            "prefill_ms": asdict(estimate([1e3 * x for x in prefill])),
            "policies": {
                policy: {
                    "ms": asdict(estimate(self.times[policy].ms)),
                    "deciding_ms": asdict(estimate(self.times[deciding(policy)].ms)),
                    "of_attention": asdict(self.share(policy, attention)),
                    "of_prefill": asdict(self.share(policy, prefill)),
                }
                for policy in policies
            },
            "raw": {name: asdict(times) for name, times in self.times.items()},
        }


def measure_length(
    arguments: argparse.Namespace, tokens: int, attend: FlashAttention, timer: Timer
) -> Length:
    """Time evictions and the parts of the prefill in turns."""
    prompt, prefill = Prompt(tokens, arguments.layers), Prefill(tokens, attend)
    prefill.check()
    contenders = prefill.contenders()
    for policy in arguments.policies:
        contenders += prompt.contenders(policy_config(policy, arguments.budget))
    return Length(tokens, arguments.layers, common.take_turns(contenders, arguments.rounds, timer))


def show(lengths: Sequence[Length], policies: Sequence[str], budget: float) -> Table:
    """A row per length and policy."""
    columns = (
        "evicting ms [95 %]",
        "deciding ms",
        "attention ms",
        "prefill ms",
        "of attention",
        "of prefill [95 %]",
    )
    title = f"eviction of one prompt to {budget:g}, {lengths[0].layers} layers"
    rows = table(title, ["tokens", "policy"], columns)
    for length in lengths:
        attention, prefill = length.seconds("attention"), length.seconds("attention", *MATRICES)
        for policy in policies:
            times, share = length.times, length.share(policy, prefill)
            rows.add_row(
                str(length.tokens),
                policy,
                shown(estimate(times[policy].ms)),
                f"{estimate(times[deciding(policy)].ms).median:.3g}",
                f"{1e3 * estimate(attention).median:.4g}",
                f"{1e3 * estimate(prefill).median:.4g}",
                f"{length.share(policy, attention).median:.2%}",
                f"{share.median:.2%} [{share.low:.2%}, {share.high:.2%}]",
            )
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.parser("eviction", __doc__, rounds=10)
    add(
        parser,
        ("lengths", whole, [8192, 32768], "tokens of the prompts"),
        ("policies", policy_name, ["snapkv", "ada-snapkv", "lava"], "that evict"),
        ("budget", budget, 0.2, "--kv-budget"),
        ("layers", whole, LAYERS, "of the model"),
    )
    arguments = parser.parse_args(argv)
    known = {"q_window", "values"}
    for name in arguments.policies:
        config = policy_config(name, arguments.budget)
        if name == "full" or not schedule_for(name).holds_whole_prompt or not config.needs <= known:
            parser.error(
                f"--policies {name}: only policies that read {' and '.join(sorted(known))} are measured"
            )
    return arguments


def measure(arguments: argparse.Namespace, timer: Timer) -> common.Found:
    """Every length, once the evictions' answers are found right."""
    attend = common.FlashAttention()
    for policy in arguments.policies:
        config = policy_config(policy, arguments.budget)
        check_eviction(config, CHECKED_TOKENS, min(CHECKED_LAYERS, arguments.layers))
    lengths = [
        measure_length(arguments, tokens, attend, timer)
        for tokens in common.show_progress(arguments.lengths, "lengths")
    ]
    prefill = ("attention", *MATRICES)
    targets = [
        Target(f"{policy}, {length.tokens} tokens, share of the prefill", share, TARGET, at_most=True)
        for length in lengths
        if length.tokens == TARGET_LENGTH
        for policy in arguments.policies
        for share in [length.share(policy, length.seconds(*prefill))]
    ]
    results = {
        "flash_attention_version": attend.version,
        "lengths": [length.summary(arguments.policies) for length in lengths],
    }
    times = [times for length in lengths for times in length.times.values()]
    return common.Found(results, times, targets, show(lengths, arguments.policies, arguments.budget))


def main(argv: Sequence[str] | None = None) -> None:
    common.run("eviction", parse_arguments(argv), measure)


if __name__ == "__main__":
    main()
