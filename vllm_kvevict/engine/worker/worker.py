"""vLLM's workers with pages of their own."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.layers import LayerMap, can_be_evicted
from vllm_kvevict.engine.memory import check_holds_longest, layout_of
from vllm_kvevict.engine.process import check_alone
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.engine.worker.draft_model import DraftModel
from vllm_kvevict.engine.worker.host_memory import ask_for_half_of_what_is_free
from vllm_kvevict.engine.worker.model_runners import forbid_decode_graphs, zero_new_windows
from vllm_kvevict.engine.worker.runtime import get_runtime, start_runtime, stop_runtime
from vllm_kvevict.engine.worker.sampling import repair_sampling
from vllm_kvevict.engine.worker.warmup import warm_up


@contextlib.contextmanager
def _no_connector_after_failure() -> Iterator[None]:
    """Where the engine does not come up, the next one of this process must not find our connector."""
    try:
        yield
    except BaseException:
        ensure_kv_transfer_shutdown()
        raise


def _spec(spec: KVCacheSpec, is_evicted: bool, others_are_cached: bool) -> KVCacheSpec:
    """What vLLM is to know of a layer."""
    if is_evicted:
        return BoundedAttentionSpec.of(spec, others_are_cached)
    if isinstance(spec, MambaSpec):
        # Steps end where states are kept; within a step vLLM could not save one on a CPU.
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
    return spec


class _EvictionMixin:
    """Installs the attention backend and hands each step's message to the runtime."""

    def init_device(self) -> None:
        check_alone()
        device = this_device()
        assert device is not None
        device.register_backend()
        super().init_device()  # type: ignore[misc]
        runtime = start_runtime(self)
        self._draft_model = DraftModel(self.model_runner, runtime.vllm_config)  # type: ignore[attr-defined]
        if device.is_asynchronous:
            forbid_decode_graphs(self.model_runner, runtime.reads_prompts)  # type: ignore[attr-defined]
        else:
            repair_sampling(self.model_runner)  # type: ignore[attr-defined]
            zero_new_windows(self.model_runner)  # type: ignore[attr-defined]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        runtime, drafts = get_runtime(), self._draft_model
        vllm_config = runtime.vllm_config
        layers = LayerMap.predicted(vllm_config)
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        runtime.evicted_layers = sorted(
            (name for name, spec in specs.items() if can_be_evicted(spec) and name not in drafts.layers),
            key=extract_layer_index,
        )
        if layers.unlisted:
            drafts.unlist(runtime.evicted_layers, len(layers.unlisted))
            specs = super().get_kv_cache_spec()  # type: ignore[misc]
        is_cached = vllm_config.cache_config.enable_prefix_caching and not layers.all_evicted
        return {
            name: _spec(spec, name in runtime.evicted_layers, is_cached)
            for name, spec in drafts.in_order(specs).items()
        }

    def determine_available_memory(self) -> int:
        # First, so that vLLM counts it among what the KV cache cannot have; where the user says how much that is, the
        # reserve comes on top, or the server does not start.
        with _no_connector_after_failure():
            get_runtime().take_reserve()
            available: int = super().determine_available_memory()  # type: ignore[misc]
            check_holds_longest(get_runtime().vllm_config, available)
        layout = layout_of(get_runtime().vllm_config)
        return available * layout.page_bytes // layout.reserved_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        get_runtime().kv_cache_config = kv_cache_config
        with _no_connector_after_failure():
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        # An eager CPU worker skips the dummy run, the only place where vLLM makes this buffer; later pipeline
        # stages then fail on their first step.
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", 0) is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> Any:
        runtime = get_runtime()
        if runtime.rank.pages.uses_triton:
            with runtime.rank.all_blocks_as_pages():
                warm_up(runtime)
        return super().compile_or_warm_up_model()  # type: ignore[misc]

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        stop_runtime(self)

    def execute_model(self, scheduler_output: Any) -> Any:
        runtime = get_runtime()
        runtime.begin_step(scheduler_output)
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            runtime.leave_step()

    def sample_tokens(self, grammar_output: Any) -> Any:
        # vLLM's V1 runner rewinds the generator of a seeded request whose prompt is not read to its end, which torch's
        # CPU generators cannot do: the engine would end. What such rows draw is dropped, so they draw without it.
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        unread = getattr(runner, "discard_request_mask", None)
        if runner.device.type != "cpu" or unread is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        generators = runner.input_batch.generators
        spared = {row: generators.pop(row) for row in list(generators) if unread.np[row]}
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            generators.update(spared)


class _OnCPU(_EvictionMixin):
    """The same, where vLLM looks for memory as soon as the worker is made."""

    def __init__(self, vllm_config: Any, *rest: Any, **named: Any):
        ask_for_half_of_what_is_free(vllm_config.cache_config)
        super().__init__(vllm_config, *rest, **named)  # type: ignore[call-arg]


def __getattr__(name: str) -> Any:
    # Each class is made on demand: vLLM's CPU worker module cannot be imported on a GPU machine.
    if name == "EvictionCPUWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker

        return type(name, (_OnCPU, CPUWorker), {"__module__": __name__})
    if name == "EvictionGPUWorker":
        from vllm.v1.worker.gpu_worker import Worker

        return type(name, (_EvictionMixin, Worker), {"__module__": __name__})
    raise AttributeError(name)
