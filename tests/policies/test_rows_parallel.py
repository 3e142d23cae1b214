"""Rows of different lengths across real gloo processes: ranks decide like one device."""

import dataclasses
import math
import random

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, row_heads, score_layer, select

WORLD, NUM_LAYERS, WINDOW, BUDGET = 4, 2, 5, 16
LAYOUTS = ((4, 8), (8, 8), (2, 8), (1, 4))
"""KV heads and query heads; with fewer KV heads than ranks some ranks hold the same ones."""


def config(policy: str, **params) -> EvictionConfig:
    return EvictionConfig(
        policy, budget=BUDGET, **({} if policy == "streaming-llm" else {"window": WINDOW}), **params
    )


ALONE = [
    config("streaming-llm"),
    config("snapkv"),
    config("snapkv", gqa="mean", rows="mean", pooling="avg"),
    config("knorm"),
    config("keydiff"),
    config("rkv"),
]
COMPETING = [
    config("ada-snapkv"),
    config("ada-snapkv", ada_safeguard="paper"),
    config("ada-snapkv", ada_safeguard="guarantee", alpha=0.6),
    config("ada-snapkv", alpha=0.0, gqa="mean"),
]
LOCAL = config("ada-snapkv", tp_local=1)


@dataclasses.dataclass
class Model:
    """A model's layers, scores full of ties that stand in for theirs, and what one device makes of both."""

    inputs: list[LayerInputs]
    ties: list[LayerScores]

    def kept(self, cfg: EvictionConfig, comm: TensorComm | None = None) -> tuple[list, list]:
        scores = [score_layer(cfg, x, i, NUM_LAYERS, comm) for i, x in enumerate(self.inputs)]
        from_ties = [] if cfg.policy == "streaming-llm" else select(cfg, self.ties, 0, comm)
        return select(cfg, scores, 0, comm), from_ties


def model(kv_heads: int, query_heads: int, kind: str) -> Model:
    """Some rows have no candidates; of kind "short" no row of the first half has. Of kind "even" all are equal."""
    rng, g = random.Random(f"{kv_heads}{kind}"), torch.Generator().manual_seed(kv_heads)
    inputs, ties = [], []
    for layer in range(NUM_LAYERS):
        lengths = [rng.choice([60, rng.randint(10, 60), rng.randint(0, 6)]) for _ in range(kv_heads)]
        if kind == "short":
            lengths = [3 if 2 * h < kv_heads else 50 + h for h in range(kv_heads)]
        if kind == "even":
            lengths = [50] * kv_heads
        pinned = [0 if kind == "even" else rng.randint(0, min(4, length)) for length in lengths]
        given = {"lengths": torch.tensor(lengths), "pinned": torch.tensor(pinned)}
        q, k = torch.randn(query_heads, WINDOW, 16, generator=g), torch.randn(kv_heads, 60, 16, generator=g)
        inputs.append(LayerInputs(q, k, **given))
        caps = [max(0, length - first - WINDOW) for length, first in zip(lengths, pinned, strict=True)]
        scores = torch.randint(0, 3, (kv_heads, max(caps)), generator=g).float().log()  # with -inf
        scores.masked_fill_(
            torch.arange(max(caps)) < torch.tensor(caps).sub(max(caps)).neg()[:, None], -math.inf
        )
        ties.append(LayerScores(layer, NUM_LAYERS, kv_heads, scores, **given))
    return Model(inputs, ties)


def part(whole: Model, queries: slice, heads: slice) -> Model:
    """What a rank holds, of which nothing is wider than its own longest row."""
    inputs, ties = [], []
    for x, scored in zip(whole.inputs, whole.ties, strict=True):
        given = {"lengths": x.lengths[heads], "pinned": x.pinned[heads]}
        longest = int(given["lengths"].max())
        inputs.append(
            LayerInputs(x.q_window[queries], x.keys[heads, x.num_tokens - longest :].contiguous(), **given)
        )
        m = max(0, int((given["lengths"] - given["pinned"]).max()) - WINDOW)
        scores = scored.scores[heads, scored.scores.shape[1] - m :]
        ties.append(LayerScores(scored.layer, NUM_LAYERS, heads.stop - heads.start, scores, **given))
    return Model(inputs, ties)


def same(kept: list, wanted: list) -> bool:
    pairs = [pair for layers in zip(kept, wanted, strict=True) for pair in zip(*layers, strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


class Rank:
    """One rank's part of a model, and the comm over which it decides."""

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup | None, layout: tuple[int, int], kind: str
    ):
        kv_heads, query_heads = layout
        self.comm = TensorComm(group, rank, size, kv_heads)
        self.heads = self.comm.local_heads
        queries = slice(rank * query_heads // size, (rank + 1) * query_heads // size)
        self.model = part(model(*layout, kind), queries, self.heads)

    def agrees(self, cfg: EvictionConfig, wanted: tuple[list, list]) -> bool:
        """Whether it decides like one device, from its tensors and from given scores."""
        found = self.model.kept(cfg, self.comm)
        return all(
            same(mine, [layer[self.heads] for layer in whole])
            for mine, whole in zip(found, wanted, strict=True)
        )

    def check(self, wanted: dict[EvictionConfig, tuple[list, list]]) -> None:
        for cfg, whole in wanted.items():
            assert self.agrees(cfg, whole), cfg
        if self.comm.replicas == 1:
            assert all(
                same(*pair)
                for pair in zip(self.model.kept(LOCAL, self.comm), self.model.kept(LOCAL), strict=True)
            )


CASES = [(layout, kind) for layout in LAYOUTS for kind in ("mixed", "short", "even")]


def references() -> list[dict]:
    """What one device decides, for all cases."""
    return [{cfg: model(*layout, kind).kept(cfg) for cfg in (*ALONE, *COMPETING)} for layout, kind in CASES]


def worker(rank: int, init: str, wanted: list[dict]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=WORLD)
    try:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for case, found in zip(CASES, wanted, strict=True):
            Rank(rank, 4, dist.group.WORLD, *case).check(found)
            Rank(rank % 2, 2, pairs[rank // 2], *case).check(found)
        if rank == 0:
            Rank(0, 1, None, *CASES[0]).check(wanted[0])
        wrong(rank, wanted)
    finally:
        dist.destroy_process_group()


def wrong(rank: int, wanted: list[dict]) -> None:
    """Controls: ranks that know nothing of each other's caps, or count columns each from its own first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_heads, "compete_over_ranks", lambda cfg, comm: None)
        agree = [
            Rank(rank, 4, dist.group.WORLD, *case).agrees(COMPETING[0], found[COMPETING[0]])
            for case, found in zip(CASES, wanted, strict=True)
        ]
        assert not all(agree) or rank
    right = row_heads.functional.pad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_heads.functional, "pad", lambda x, sides: right(x, sides[::-1]))
        cfg, ties = COMPETING[3], []
        for case, found in zip(CASES[3:6], wanted[3:6], strict=True):
            own = Rank(rank, 4, dist.group.WORLD, *case)
            kept = select(cfg, own.model.ties, 0, own.comm)
            ties.append(same(kept, [layer[own.heads] for layer in found[cfg][1]]))
        assert not all(ties) or rank


@pytest.mark.long
def test_ranks_decide_like_one_device(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks, lest sums differ in their last digit
    wanted = references()
    torch.set_num_threads(threads)
    arguments = (str(tmp_path / "init"), wanted)
    multiprocessing.start_processes(worker, args=arguments, nprocs=WORLD, start_method="fork")
