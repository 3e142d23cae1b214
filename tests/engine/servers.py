"""Scheduler and ledger of a server that tests describe, built as the engine core builds them."""

import copy
import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.models import make_model
from vllm_kvevict import __version__
from vllm_kvevict.engine.config import KEY, Options
from vllm_kvevict.engine.messages import Handshake
from vllm_kvevict.engine.peaks import RankCapacity
from vllm_kvevict.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler

PAGE = 32
TOKEN = 7
"""What every sampled token is."""

Shape = tuple[int, int]
"""Layers and KV heads of a rank."""


@dataclass(frozen=True)
class Setup:
    """A server: its pools, its scheduler's limits, its eviction options.

    Attributes:
        shapes: (layers, KV heads) of each rank.
        pages: of each rank's pool.
        depth: steps in flight; above 1 as under pipeline parallelism or asynchronous scheduling.
        pipeline: whether each rank is a stage with layers of its own; else all hold the same layers.
        options: of ``additional_config["kv_eviction"]``; None builds vLLM's own scheduler, with as many blocks of
            ``PAGE`` tokens as the first rank's pool has pages for all its rows.
    """

    shapes: Sequence[Shape]
    pages: Sequence[int]
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    depth: int = 1
    pipeline: bool = False
    asynchronous: bool = False
    priority: bool = False
    options: Mapping[str, Any] | None = field(default_factory=lambda: {"policy": "ada-snapkv", "budget": 0.2})


def capacities(setup: Setup) -> list[RankCapacity]:
    """What each rank says of itself. Ranks that are not stages share the heads of their layers."""
    sizes = [layers for layers, _ in setup.shapes]
    if setup.pipeline:
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        layers, heads = sum(sizes), max(heads for _, heads in setup.shapes)
    else:
        firsts = [0] * len(sizes)
        layers, heads = max(sizes), sum(heads for _, heads in setup.shapes)
    return [
        RankCapacity(pages, first, *shape, layers, heads)
        for pages, first, shape in zip(setup.pages, firsts, setup.shapes, strict=True)
    ]


@functools.cache
def _base_config(evicts: bool) -> VllmConfig:
    """A configuration of a tiny model, from which each scheduler takes a changed copy."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, layers=1, max_len=1 << 16)
        settings: dict[str, Any] = {"enable_prefix_caching": False}
        if evicts:
            settings = {"additional_config": {KEY: {"policy": "ada-snapkv"}}}
        args = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **settings)
        return args.create_engine_config()


def make_scheduler(setup: Setup) -> Scheduler:
    """Build the scheduler as the engine core does, and introduce the ranks to it."""
    config = copy.copy(_base_config(setup.options is not None))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.model_config = copy.copy(config.model_config)
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config.max_num_batched_tokens = setup.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = setup.max_num_batched_tokens
    config.scheduler_config.max_num_seqs = config.scheduler_config.max_num_active_seqs = setup.max_num_seqs
    config.scheduler_config.policy = "priority" if setup.priority else "fcfs"
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.pipeline_parallel_size = len(setup.shapes) if setup.pipeline else 1
    config.model_config.max_model_len = setup.max_model_len
    layers, heads = setup.shapes[0]
    # The block that vLLM's manager always keeps aside comes on top.
    blocks = setup.pages[0] // (layers * heads) + 1
    config.cache_config.block_size = PAGE
    config.cache_config.num_gpu_blocks = blocks
    if setup.options is None:
        kind: type[Scheduler] = AsyncScheduler if setup.asynchronous else Scheduler
    else:
        config.additional_config = {KEY: {"page_size": PAGE, **setup.options}}
        kind = AsyncEvictionScheduler if setup.asynchronous else EvictionScheduler
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=heads, head_size=32, dtype=torch.float32)
    names = [f"layers.{index}" for index in range(layers)]
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=PAGE,
    )
    if setup.options is not None:
        assert scheduler.connector is not None
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (rank, 0): Handshake(rank, capacity, __version__)
                for rank, capacity in enumerate(capacities(setup))
            }
        )
    return scheduler


def make_request(
    name: str,
    prompt: int,
    max_tokens: int,
    extra_args: dict[str, Any] | None = None,
    priority: int = 0,
    arrival: float = 0.0,
) -> Request:
    """A request of ``prompt`` tokens that ends after exactly ``max_tokens`` outputs."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
    return Request(name, [TOKEN] * prompt, params, None, arrival_time=arrival, priority=priority)


def options_of(setup: Setup) -> Options:
    """The server's options as the scheduler reads them."""
    return Options.parse({"page_size": PAGE, **(setup.options or {})})
