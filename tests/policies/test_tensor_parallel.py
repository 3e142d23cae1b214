"""Decisions across real gloo processes equal those of one device; pipeline stages equal the whole."""

import dataclasses

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    layer_budgets,
    score_layer,
    select,
)
from vllm_kvevict.policies.registry import lookup

from . import reference_select
from .layers import model_inputs, repeated, those_of

WORLD, N, NUM_LAYERS, WINDOW = 4, 120, 3, 8


def config(policy: str, **params) -> EvictionConfig:
    size = those_of(policy, window=WINDOW, take_probe=WINDOW, sinks=4) | params
    return EvictionConfig(policy, **({"budget": 30} if "keep_ratio" not in params else {}), **size)


CONFIGS = [
    *[config(policy) for policy in available() if policy != "full"],
    config("snapkv", rows="recent", gqa="max", pooling="decay"),
    config("ada-snapkv", rows="max", gqa="max", kernel=31),
    config("lava-uniform", gqa="mean", pooling="decay"),
    config("ada-snapkv", keep_ratio=0.3, alpha=0),
    config("ada-snapkv", ada_safeguard="guarantee"),
    EvictionConfig("snapkv", budget=N, window=WINDOW),
    EvictionConfig("h2o", budget=30, window=0, h2o_norm="mean"),
    config("lava", alpha=0.3, gqa="mean", pooling="avg"),
    config("cake", gqa="max", pooling="max", kernel=7, gamma=3.0, tau1=1.6, tau2=0.4),
    config("vatp-snapkv", sinks=4, gqa="max"),
    config("knorm", skip_layers=1),
    config("criticalkv", first=0.2, gqa="max", pooling="none"),
    config("ada-criticalkv", alpha=0, ada_safeguard="guarantee"),
    config("defensivekv", mass=0.8),
    config("layer-defensivekv", kernel=3),
    EvictionConfig("kvzip", keep_ratio=0.3),
    config("kvzip", pooling="decay", sinks=0),
    config("compactor", leverage_chunk=50, blend=2.0, sinks=0),
    config("expected-attention", keep_ratio=0.3, epsilon=0.01),
    config("dropkv", pooling="avg", kernel=5),
]
# Policies whose scores, and whose choices, concern one KV head at a time.
QUIET_SCORES = (
    "streaming-llm",
    "snapkv",
    "h2o",
    "pyramidkv",
    "vatp-snapkv",
    "knorm",
    "keydiff",
    "criticalkv",
    "take",
    "kvzip",
    "expected-attention",
    "dropkv",
)
QUIET_CHOICES = (*(set(QUIET_SCORES) - {"kvzip", "dropkv"}), "tova", "lava-uniform-head", "cake")


def same(kept: list, wanted: list) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(kept, wanted, strict=True)
    )


def equal(mine: torch.Tensor | None, wanted: torch.Tensor | None, heads: slice) -> bool:
    return mine is wanted is None or torch.equal(mine, wanted[heads])


def layers_of_a_model(kv_heads: int, query_heads: int) -> list[LayerInputs]:
    return model_inputs(kv_heads, NUM_LAYERS, kv_heads, query_heads // kv_heads, N, 16, WINDOW)


def part(x: LayerInputs, queries: slice, heads: slice) -> LayerInputs:
    """What a rank holds: its query heads with their slices of the output projection, its KV heads."""
    mine = LayerInputs(
        x.q_window[queries],
        x.keys[heads],
        x.values[heads],
        q_all=x.q_all[queries],
        w_o=x.w_o[queries],
        rotary=x.rotary,
    )
    return repeated(mine)


def given_scores(cfg: EvictionConfig, kv_heads: int, generator: torch.Generator) -> list[LayerScores]:
    """Layers full of ties."""
    shape = (2, NUM_LAYERS, kv_heads, N - cfg.window_for(N))
    ties = torch.randint(0, 4, shape, generator=generator).float()
    return [
        LayerScores(i, NUM_LAYERS, kv_heads, ties[0, i], weight=0.3 + i, second=ties[1, i])
        for i in range(NUM_LAYERS)
    ]


def slice_of(x: LayerScores, heads: slice) -> LayerScores:
    return dataclasses.replace(
        x, num_kv_heads=heads.stop - heads.start, scores=x.scores[heads], second=x.second[heads]
    )


def with_budgets(cfg: EvictionConfig, layers: list[LayerScores]) -> list[LayerScores]:
    budgets = layer_budgets(cfg, [float(x.weight) for x in layers], N)
    return [dataclasses.replace(x, budget=b) for x, b in zip(layers, budgets, strict=True)]


@dataclasses.dataclass(frozen=True)
class Whole:
    """What one device makes of a model's tensors, and of scores full of ties."""

    scores: list[LayerScores]
    kept: list
    ties: list[LayerScores]
    kept_of_ties: list


References = dict[EvictionConfig, Whole]
LAYOUTS = ((4, 8), (8, 8), (2, 8), (1, 4))
"""KV heads and query heads of the models."""


def references(kv_heads: int, query_heads: int) -> References:
    """Of all configurations; computed once, since every rank compares with the same."""
    layers = layers_of_a_model(kv_heads, query_heads)
    g = torch.Generator().manual_seed(kv_heads)
    found = {}
    for cfg in CONFIGS:
        scores = [score_layer(cfg, x, i, NUM_LAYERS) for i, x in enumerate(layers)]
        ties = given_scores(cfg, kv_heads, g)
        found[cfg] = Whole(scores, select(cfg, scores, N), ties, select(cfg, ties, N))
    return found


class SilentComm(TensorComm):
    """Lets only the replicas of a KV head exchange the rows of its query heads."""

    def gather_heads(self, local: torch.Tensor) -> torch.Tensor:
        raise AssertionError("gather_heads where every rank can decide alone")

    def sum_counts(self, local: torch.Tensor) -> torch.Tensor:
        raise AssertionError("sum_counts where every rank can decide alone")


class Rank:
    """One rank's share of a layer stack, decided with the others, against the decision of one device."""

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        layout: tuple[int, int],
        wanted: References,
    ):
        kv_heads, query_heads = layout
        self.comm = TensorComm(group, rank, size, kv_heads)
        self.silent = SilentComm(group, rank, size, kv_heads)
        self.heads = self.comm.local_heads
        queries = slice(rank * query_heads // size, (rank + 1) * query_heads // size)
        self.layers = [part(x, queries, self.heads) for x in layers_of_a_model(*layout)]
        self.wanted = wanted

    def scores(self, cfg: EvictionConfig, comm: TensorComm) -> list[LayerScores]:
        """Scores of the rank's heads, which equal one device's."""
        scores = [score_layer(cfg, x, i, NUM_LAYERS, comm) for i, x in enumerate(self.layers)]
        for mine, theirs in zip(scores, self.wanted[cfg].scores, strict=True):
            assert equal(mine.scores, theirs.scores, self.heads), cfg
            assert equal(mine.second, theirs.second, self.heads), cfg
            assert (mine.weight is None) == (theirs.weight is None), cfg
            assert mine.weight is None or float(mine.weight) == float(theirs.weight), cfg
        return scores

    def check(self, cfg: EvictionConfig) -> None:
        wanted, heads = self.wanted[cfg], self.heads
        choosing = self.silent if cfg.policy in QUIET_CHOICES else self.comm
        scores = self.scores(cfg, self.silent if cfg.policy in QUIET_SCORES else self.comm)
        kept = select(cfg, scores, N, choosing)
        assert same(kept, [layer[heads] for layer in wanted.kept]), cfg
        if cfg.policy in reference_select.DYNAMIC:  # a pipeline stage with one layer
            for i, x in enumerate(with_budgets(cfg, scores)):
                assert same(select(cfg, [x], N, choosing), [kept[i]]), cfg
        kept = select(cfg, [slice_of(x, heads) for x in wanted.ties], N, choosing)
        assert same(kept, [layer[heads] for layer in wanted.kept_of_ties]), cfg

    def check_all(self) -> None:
        for cfg in CONFIGS:
            self.check(cfg)


def worker(rank: int, init: str, wanted: dict[tuple[int, int], References]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=WORLD)
    try:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for layout, found in wanted.items():
            Rank(rank, 4, dist.group.WORLD, layout, found).check_all()
        # Half of the layouts by each pair, at the same time.
        for layout in LAYOUTS[rank // 2 :: 2]:
            Rank(rank % 2, 2, pairs[rank // 2], layout, wanted[layout]).check_all()
        if rank == 0:
            Rank(0, 1, None, LAYOUTS[0], wanted[LAYOUTS[0]]).check_all()
        tagged = torch.full((1, 2), float(rank))
        comm = TensorComm(None, rank, WORLD, 2)
        assert comm.gather_heads(tagged)[:, 0].tolist() == [0, 2]
        assert comm.gather_group_rows(tagged)[:, 0].tolist() == ([0, 1] if rank < 2 else [2, 3])
        counts = torch.tensor([rank + 1, 10])
        assert comm.sum_counts(counts).tolist() == [4, 20] and counts.tolist() == [rank + 1, 10]
        assert TensorComm(None, rank, WORLD, 8).sum_counts(counts).tolist() == [10, 40]
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_ranks_decide_like_one_device(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks, lest sums differ in their last digit
    wanted = {layout: references(*layout) for layout in LAYOUTS}
    torch.set_num_threads(threads)
    # Forked, so that they have what was computed and imported here.
    arguments = (str(tmp_path / "init"), wanted)
    multiprocessing.start_processes(worker, args=arguments, nprocs=WORLD, start_method="fork")


def test_what_a_policy_needs_from_other_layers():
    for cfg in CONFIGS:
        schedule = lookup(cfg.policy).schedule
        assert (schedule == "whole") == (cfg.policy not in reference_select.WHOLE_MODEL)
        assert (schedule in ("by score", "by repeat")) == (reference_select.RULES[cfg.policy][0] == "global")


@pytest.mark.parametrize(
    ("rank", "size", "kv_heads", "heads", "replicas"),
    [
        (1, 2, 8, (4, 8), 1),
        (3, 4, 2, (1, 2), 2),
        (1, 4, 2, (0, 1), 2),
        (2, 4, 1, (0, 1), 4),
        (0, 1, 3, (0, 3), 1),
    ],
)
def test_where_heads_lie(rank, size, kv_heads, heads, replicas):
    comm = TensorComm(None, rank, size, kv_heads)
    assert (comm.local_heads.start, comm.local_heads.stop) == heads
    assert comm.replicas == replicas


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_kv_heads_total=3 must divide size=2"):
        TensorComm(None, 0, 2, 3)
    with pytest.raises(ValueError, match=r"comm places KV heads 0\.\.3"):
        scores = LayerScores(0, 1, 8, torch.rand(8, N - WINDOW))
        select(config("snapkv"), [scores], N, TensorComm(None, 0, 2, 8))
