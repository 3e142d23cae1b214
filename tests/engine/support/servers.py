"""Scheduler and ledger of a server that tests describe, built as the engine core builds them."""

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import envs
from vllm.config import LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.harness.models import make_model
from vllm_kvevict import __version__
from vllm_kvevict.engine import devices
from vllm_kvevict.engine.config import KEY, Options
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.messages import Handshake
from vllm_kvevict.engine.request_options import RESOLVED, RequestOptions
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.scheduler.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Plan

flights = pytest.mark.parametrize(
    "flight",
    [{}, {"depth": 2, "asynchronous": True}, {"depth": 3}],
    ids=["in_step", "ahead", "three_in_flight"],
)
"""Settings of a server that has a step in flight, or schedules ahead, or has more of them."""
PAGE = 32
HEAD_SIZE = 32
DIMS = HeadDims(HEAD_SIZE, 1)
TOKEN = 7
"""What every sampled token is."""
STOP = 8
"""Unless it ends the answer."""

Shape = tuple[int, int]
"""Layers and KV heads of a rank."""


@dataclass(frozen=True)
class Setup:
    """A server: its pools, its scheduler's limits, its eviction options.

    Attributes:
        shapes: (layers, KV heads) of each rank.
        pages: of each rank's pool.
        depth: steps in flight; above 1 as under pipeline parallelism or asynchronous scheduling.
        pipeline: whether there are stages with layers of their own, of ``tensor`` ranks each; else all ranks hold the
            same layers.
        replicas: how many ranks in a row hold the same KV heads.
        long_prefill: vLLM's ``long_prefill_token_threshold``.
        has_w_o: whether the workers can read output projections.
        gpu: whether admission counts as on a GPU, where fewer prompts are evicted layer by layer; holds within
            :func:`surroundings`.
        prefix_caching: whether evicted prefixes are cached; else each request is evicted.
        drafts: most draft tokens of a request and step; 0 without speculative decoding.
        drafter: by which method a draft model drafts whose KV shares the memory; "" without such KV.
        is_small: whether the draft model has one layer; else as many as are evicted.
        window: the sliding window of as many layers beside the evicted ones, which share their memory; 0 for none.
        states: whether there are as many layers besides that remember a state of each request.
        adapters: LoRA adapters that a step may use at most; 0 without LoRA.
        ring_parts: answers whose queries the workers can keep at once.
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
    tensor: int = 1
    replicas: int = 1
    asynchronous: bool = False
    priority: bool = False
    long_prefill: int = 0
    has_w_o: bool = True
    gpu: bool = False
    prefix_caching: bool = False
    drafts: int = 0
    drafter: str = ""
    is_small: bool = False
    window: int = 0
    states: bool = False
    adapters: int = 0
    ring_parts: int = 64
    options: Mapping[str, Any] | None = field(default_factory=lambda: {"policy": "ada-snapkv", "budget": 0.2})

    @property
    def has_other_layers(self) -> bool:
        """Whether layers that are not evicted share the memory."""
        return bool(self.window or self.states or self.drafter)


def deepest(setup: Setup) -> int:
    """The most steps that vLLM has in flight: one for each pipeline stage, and one more if it schedules ahead."""
    return len(stages(setup)) + setup.asynchronous


def stages(setup: Setup) -> list[Sequence[Shape]]:
    """The shapes of each pipeline stage's ranks."""
    ranks = setup.tensor if setup.pipeline else len(setup.shapes)
    return [setup.shapes[first : first + ranks] for first in range(0, len(setup.shapes), ranks)]


def stage_layers(setup: Setup) -> list[int]:
    """Layers of each pipeline stage."""
    return [max(layers for layers, _ in stage) for stage in stages(setup)]


def capacities(setup: Setup) -> list[RankCapacity]:
    """What each rank says of itself. Ranks of one stage share the heads of its layers."""
    sizes = stage_layers(setup)
    firsts = [sum(sizes[:index]) for index, stage in enumerate(stages(setup)) for _ in stage]
    heads = max(sum(heads for _, heads in stage) for stage in stages(setup)) // setup.replicas
    return [
        RankCapacity(pages, first, *shape, sum(sizes), heads)
        for pages, first, shape in zip(setup.pages, firsts, setup.shapes, strict=True)
    ]


@contextlib.contextmanager
def surroundings(setup: Setup) -> Iterator[None]:
    """What vLLM and the engine learn from the process they run in: the layers of each stage, the device."""
    layers = ",".join(map(str, stage_layers(setup)))
    with (
        mock.patch.object(envs, "VLLM_PP_LAYER_PARTITION", layers, create=True),
        mock.patch.object(devices, "CPU", devices.CUDA if setup.gpu else devices.CPU),
    ):
        yield


@functools.cache
def _base_config(evicts: bool) -> VllmConfig:
    """A configuration of a tiny model, from which each scheduler takes a changed copy."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, layers=1, head_dim=HEAD_SIZE, max_len=1 << 16)
        settings: dict[str, Any] = {"enable_prefix_caching": False}
        if evicts:
            settings = {"additional_config": {KEY: {"policy": "ada-snapkv"}}}
        args = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **settings)
        return args.create_engine_config()


def make_config(setup: Setup) -> VllmConfig:
    """What vLLM's processes know of the server once its KV memory is found out."""
    config = copy.copy(_base_config(setup.options is not None))
    for name in ("scheduler_config", "model_config", "cache_config", "parallel_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    scheduler, model = config.scheduler_config, config.model_config
    scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = setup.max_num_batched_tokens
    scheduler.max_num_seqs = scheduler.max_num_active_seqs = setup.max_num_seqs
    scheduler.policy = "priority" if setup.priority else "fcfs"
    scheduler.async_scheduling = setup.asynchronous
    scheduler.long_prefill_token_threshold = setup.long_prefill
    config.parallel_config.pipeline_parallel_size = len(stages(setup))
    config.parallel_config.tensor_parallel_size = len(stages(setup)[0])
    model.max_model_len = setup.max_model_len
    room = capacities(setup)[0]
    model.get_total_num_hidden_layers = lambda: room.num_model_layers
    model.get_num_kv_heads = lambda parallel_config: room.num_kv_heads
    model.get_num_attention_heads = lambda parallel_config: room.num_kv_heads * DIMS.group
    model.get_total_num_kv_heads = lambda: room.num_model_kv_heads
    config.cache_config.block_size = PAGE
    config.cache_config.enable_prefix_caching = setup.prefix_caching
    config.cache_config.mamba_cache_mode = "align" if setup.states and setup.prefix_caching else "none"
    layers = (
        setup.shapes[0][0] if setup.is_small else 1
    )  # a block has a place for each layer of the smallest group
    config.cache_config.num_gpu_blocks = layers * (room.pages // room.rows)
    if setup.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.drafts,
            target_model_config=model,
            target_parallel_config=config.parallel_config,
        )
    if setup.adapters:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=setup.adapters)
    if setup.options is not None:
        config.additional_config = {KEY: {"page_size": PAGE, **setup.options}}
    return config


def _groups(setup: Setup) -> list[KVCacheGroupSpec]:
    """vLLM's groups of layers, those that are evicted first, but for a draft model that runs on its own; blocks of all
    groups have one size."""
    layers, heads = setup.shapes[0]
    shape = {"block_size": PAGE, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}
    full: KVCacheSpec = FullAttentionSpec(**shape)
    if setup.options is not None:
        full = BoundedAttentionSpec.of(full, setup.prefix_caching and setup.has_other_layers)
    specs = [full]
    if setup.window:
        specs.append(SlidingWindowSpec(sliding_window=setup.window, **shape))
    if setup.states:
        state = ((full.page_size_bytes,),)
        size, mode = (PAGE, "align") if setup.prefix_caching else (setup.max_model_len, "none")
        specs.append(MambaSpec(block_size=size, shapes=state, dtypes=(torch.int8,), mamba_cache_mode=mode))
    if setup.drafter:
        specs.insert(0 if setup.drafter == "draft_model" else len(specs), FullAttentionSpec(**shape))
    return [
        KVCacheGroupSpec([f"layers.{group * layers + layer}" for layer in range(layers)], spec)
        for group, spec in enumerate(specs)
    ]


def make_scheduler(setup: Setup) -> Scheduler:
    """Build the scheduler as the engine core does, and introduce the ranks to it."""
    config = make_config(setup)
    if setup.options is None:
        kind: type[Scheduler] = AsyncScheduler if setup.asynchronous else Scheduler
        # The block that vLLM's manager always keeps aside comes on top.
        config.cache_config.num_gpu_blocks += 1
    else:
        kind = AsyncEvictionScheduler if setup.asynchronous else EvictionScheduler
    if speculation := config.speculative_config if setup.drafter else None:
        speculation.method, speculation.draft_model_config = setup.drafter, config.model_config
        speculation.draft_parallel_config = config.parallel_config
        if setup.drafter == "draft_model":  # for which vLLM takes a token more of each request
            config.scheduler_config.max_num_batched_tokens += setup.max_num_seqs
    groups = _groups(setup)
    blocks = config.cache_config.num_gpu_blocks
    if setup.has_other_layers:
        # What is kept for the other layers comes on top.
        blocks += LayerMap.found(groups).blocks_kept(config)
        config.cache_config.num_gpu_blocks = blocks
    kv_cache = KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=0)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    if setup.options is not None:
        assert scheduler.connector is not None
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (rank, 0): Handshake(rank, capacity, __version__, setup.has_w_o, ring_parts=setup.ring_parts)
                for rank, capacity in enumerate(capacities(setup))
            }
        )
        _read_when_asked(scheduler.kv_cache_manager)
    return scheduler


def _read_when_asked(ledger: PageLedger) -> None:
    """Let requests come as clients send them: they are read when the ledger asks first, as a front-end reads them."""
    plan = ledger.requests.plan

    def read(request: Request) -> Plan:
        if (params := request.sampling_params) and RESOLVED not in (given := params.extra_args or {}):
            most = min(request.max_tokens, ledger.max_model_len - request.num_prompt_tokens)
            found = RequestOptions.read(ledger.options, given, request.num_prompt_tokens, most_output=most)
            params.extra_args = found.to_extra_args(given)
        return plan(request)

    setattr(ledger.requests, "plan", read)  # noqa: B010


def make_request(
    name: str,
    prompt: int | Sequence[int],
    max_tokens: int,
    extra_args: dict[str, Any] | None = None,
    priority: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    adapter: int = 0,
) -> Request:
    """A request that ends after exactly ``max_tokens`` outputs, or with ``STOP``.

    Args:
        prompt: how many tokens it has; or the tokens, which are then hashed as for a prefix cache.
        adapter: number of a LoRA adapter; 0 for none.
    """
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP], extra_args=extra_args
    )
    tokens = [TOKEN] * prompt if isinstance(prompt, int) else list(prompt)
    return Request(
        name,
        tokens,
        params,
        None,
        arrival_time=arrival,
        lora_request=LoRARequest(f"adapter {adapter}", adapter, "nowhere") if adapter else None,
        priority=priority,
        cache_salt=salt,
        block_hasher=None if isinstance(prompt, int) else _block_hasher(),
    )


@functools.cache
def _block_hasher() -> Callable[[Request], list[Any]]:
    """What the engine core hashes prompts with."""
    init_none_hash(sha256)
    return get_request_block_hasher(PAGE, sha256)


def options_of(setup: Setup) -> Options:
    """The server's options as the scheduler reads them."""
    return Options.parse({"page_size": PAGE, **(setup.options or {})})
