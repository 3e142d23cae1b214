"""Decisions across real gloo processes equal those of one device; pipeline stages equal the whole."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, score_layer, select

WORLD, N, NUM_LAYERS, WINDOW = 4, 120, 3, 8
CONFIGS = [
    EvictionConfig("streaming-llm", budget=30),
    EvictionConfig("snapkv", budget=30, window=WINDOW),
    EvictionConfig("snapkv", budget=30, window=WINDOW, gqa="max", pooling="avg", kernel=5),
    EvictionConfig("pyramidkv", budget=30, window=WINDOW),
    EvictionConfig("ada-snapkv", budget=30, window=WINDOW),
    EvictionConfig("ada-snapkv", keep_ratio=0.3, window=WINDOW, alpha=0),
    EvictionConfig("ada-snapkv", budget=30, window=WINDOW, ada_safeguard="guarantee"),
    EvictionConfig("ada-pyramid", budget=30, window=WINDOW),
    EvictionConfig("snapkv", budget=N, window=WINDOW),
]


def same(kept: list, wanted: list) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(kept, wanted, strict=True)
    )


def check_rank(rank: int, size: int, group: dist.ProcessGroup, kv_heads: int, query_heads: int) -> None:
    """One rank's share of a layer stack, decided with the others, against the decision of one device."""
    comm = TensorComm(group, rank, size, kv_heads)
    heads = comm.local_heads
    queries = slice(rank * query_heads // size, (rank + 1) * query_heads // size)
    g = torch.Generator().manual_seed(kv_heads)
    whole = [
        LayerInputs(
            torch.randn(query_heads, WINDOW, 16, generator=g), torch.randn(kv_heads, N, 16, generator=g)
        )
        for _ in range(NUM_LAYERS)
    ]
    ties = torch.randint(0, 4, (NUM_LAYERS, kv_heads, N - WINDOW), generator=g).float()
    for cfg in CONFIGS:
        wanted_scores = [score_layer(cfg, x, i, NUM_LAYERS) for i, x in enumerate(whole)]
        scores = [
            score_layer(cfg, LayerInputs(x.q_window[queries], x.keys[heads]), i, NUM_LAYERS, comm)
            for i, x in enumerate(whole)
        ]
        for mine, wanted in zip(scores, wanted_scores, strict=True):
            assert mine.scores is None or torch.equal(mine.scores, wanted.scores[heads]), cfg
        kept = select(cfg, scores, N, comm)
        assert same(kept, [layer[heads] for layer in select(cfg, wanted_scores, N)]), cfg

        wanted_scores = [LayerScores(i, NUM_LAYERS, kv_heads, x) for i, x in enumerate(ties)]
        scores = [LayerScores(i, NUM_LAYERS, heads.stop - heads.start, x[heads]) for i, x in enumerate(ties)]
        kept = select(cfg, scores, N, comm)
        assert same(kept, [layer[heads] for layer in select(cfg, wanted_scores, N)]), cfg


def worker(rank: int, init: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=WORLD)
    try:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for kv_heads, query_heads in ((4, 8), (8, 8), (2, 8), (1, 4)):
            check_rank(rank, 4, dist.group.WORLD, kv_heads, query_heads)
            check_rank(rank % 2, 2, pairs[rank // 2], kv_heads, query_heads)
            check_rank(0, 1, None, kv_heads, query_heads)
        tagged = torch.full((1, 2), float(rank))
        comm = TensorComm(None, rank, WORLD, 2)
        assert comm.gather_heads(tagged)[:, 0].tolist() == [0, 2]
        assert comm.gather_group_rows(tagged)[:, 0].tolist() == ([0, 1] if rank < 2 else [2, 3])
    finally:
        dist.destroy_process_group()


def test_ranks_decide_like_one_device(tmp_path):
    multiprocessing.spawn(worker, args=(str(tmp_path / "init"),), nprocs=WORLD)


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
def test_pipeline_stages_decide_like_the_whole(cfg):
    scores = [LayerScores(i, 6, 2, x) for i, x in enumerate(torch.rand(6, 2, N - cfg.window_for(N)))]
    whole = select(cfg, scores, N)
    for stages in (1, 2, 6):
        size = 6 // stages
        assert same([x for i in range(0, 6, size) for x in select(cfg, scores[i : i + size], N)], whole)


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
        select(CONFIGS[1], [LayerScores(0, 1, 8, torch.rand(8, N - WINDOW))], N, TensorComm(None, 0, 2, 8))
