"""Functions that vLLM calls and we define, and functions that we call and vLLM defines."""

import ast

import pytest

from tests.contract import source

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
BACKEND = "vllm.v1.attention.backend"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

WRAPPED: dict[str, str] = {
    # What we replace with a wrapper names these first, in this order; what follows is passed on as it is.
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": "parser",
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": "args",
    "vllm.v1.engine.input_processor:InputProcessor.__init__": "vllm_config",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "request_id prompt params",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "prompt sampling_params",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": "request_id prompt params",
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": "",
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search": "",
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search": "",
    "vllm.renderers.base:BaseRenderer.render_chat": "conversations chat_params tok_params",
    "vllm.renderers.base:BaseRenderer.render_chat_async": "conversations chat_params tok_params",
    "vllm.renderers.online_renderer:OnlineRenderer._make_request_with_harmony": "request should_include_tools",
    "vllm.renderers.online_renderer:OnlineRenderer.render_responses_harmony_messages": "messages cache_salt tok_params",
    f"{MANAGER}:KVCacheManager.allocate_slots": "request num_new_tokens num_new_computed_tokens",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids": "block_ids",
    f"{SCHEDULER}.schedule": "throttle_prefills",
    f"{SCHEDULER}.finish_requests": "request_ids finished_status",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "metadata draft_probs logits sampling_metadata",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    f"{COORDINATOR}.get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens num_local_computed_tokens"
    ),
}

CALLED: dict[str, str] = {
    # We call these with these names, or with as many values.
    f"{MANAGER}:KVCacheManager.__init__": (
        "kv_cache_config max_model_len max_in_flight_tokens scheduler_block_size hash_block_size enable_caching "
        "log_stats"
    ),
    f"{MANAGER}:KVCacheManager.allocate_slots": "request num_new_tokens num_new_computed_tokens delay_cache_blocks",
    f"{COORDINATOR}.find_longest_cache_hit": "block_hashes max_cache_hit_length",
    f"{COORDINATOR}.get_num_cacheable_tokens": "num_computed_tokens kv_cache_group_id",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks": (
        "request num_tokens retention_interval replay_boundaries"
    ),
    "vllm.v1.core.block_pool:BlockPool.touch": "blocks",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": "block_ids",
    "vllm.v1.engine.output_processor:OutputProcessor.propagate_error": "e",
    "vllm.config:KVTransferConfig": "kv_connector kv_role kv_connector_module_path",
    "vllm.v1.engine:EngineCoreOutput": "request_id new_token_ids finish_reason events trace_headers",
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id prompt_token_ids prefill_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request"
    ),
    "vllm._custom_ops:cpu_attention_with_kv_cache": (
        "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window "
        "block_table softcap scheduler_metadata s_aux"
    ),
    "vllm._custom_ops:cpu_attn_get_scheduler_metadata": (
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal sliding_window_size isa "
        "enable_kv_split"
    ),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa",
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "dtype block_size head_size",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version": "head_size",
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": (
        "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table softcap "
        "fa_version"
    ),
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": (
        "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table softcap "
        "window_size q_descale k_descale v_descale sinks kv_quant_mode k_scale_cache v_scale_cache"
    ),
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path",
    "vllm.distributed.utils:get_pp_indices": "num_hidden_layers pp_rank pp_size",
    "vllm.exceptions:VLLMValidationError": "message parameter value",
    "vllm.utils:length_from_prompt_token_ids_or_embeds": "prompt_token_ids prompt_embeds",
    "vllm.renderers.base:BaseRenderer.render_messages": "messages params",
    "vllm.renderers.params:TokenizeParams": "max_total_tokens add_special_tokens",
    "vllm.renderers.base:BaseRenderer.tokenize_prompt": "prompt params",
    "vllm.config:ModelConfig.get_num_kv_heads": "parallel_config",
    "vllm.config:ModelConfig.get_head_size": "",
    "vllm.config:ModelConfig.get_num_attention_heads": "parallel_config",
    "vllm.config:ModelConfig.get_layers_start_end_indices": "parallel_config",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": "layer x",
    "vllm.config:set_current_vllm_config": "vllm_config",
    "vllm.engine.arg_utils:EngineArgs.create_model_config": "",
    "vllm.platforms.interface:Platform._align_hybrid_block_size": "vllm_config backend_cls",
    "vllm.renderers:renderer_from_config": "config",
}


@pytest.mark.parametrize("place", WRAPPED)
def test_wrapped_function_begins_alike(place: str) -> None:
    names, expected = source.parameters(place), WRAPPED[place].split()
    if names[: len(expected)] != expected:
        source.broken(f"{place} takes ({', '.join(names)}), we expect ({', '.join(expected)}, ...)")


@pytest.mark.parametrize("place", CALLED)
def test_call_is_accepted(place: str) -> None:
    names = source.parameters(place)
    missing = [name for name in CALLED[place].split() if name not in names]
    if missing:
        source.broken(f"{place} takes no {', '.join(missing)}")


def test_the_responses_api_names_what_our_wrapper_reads() -> None:
    place = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
    found = [
        {keyword.arg for keyword in call.keywords}
        for call in source.calls(place)
        if ast.unparse(call.func) == "self._generate_with_builtin_tools"
    ]
    if not found or not all({"engine_input", "sampling_params"} <= names for names in found):
        source.broken(f"{place} does not call it with both", "streamed /v1/responses fail or are not checked")


SAME_BY_DEFAULT = {
    "enable_kv_cache_events",
    "enable_mamba_shared_prefix_checkpoint",
    "dcp_world_size",
    "metrics_collector",
    "num_hash_lookahead_tokens",
    "num_prefill_lookahead",
    "pcp_world_size",
    "prefix_replay_tokens",
    "use_eagle",
    "use_eagle_block_drop",
    "watermark",
}
"""What vLLM's scheduler tells its block manager besides, of features that eviction refuses or has in its own
way: there the defaults hold."""


def test_the_manager_is_made_of_what_we_know() -> None:
    """Our ledger takes the place of vLLM's block manager, and is told what that is told."""
    made = [
        node for node in source.calls(f"{SCHEDULER}.__init__") if ast.unparse(node.func) == "KVCacheManager"
    ]
    told = {str(keyword.arg) for node in made for keyword in node.keywords}
    ours = set(CALLED[f"{MANAGER}:KVCacheManager.__init__"].split())
    if unknown := told - ours - SAME_BY_DEFAULT:
        source.broken(f"the block manager is told {', '.join(sorted(unknown))}", "our ledger is not")


CALLERS = {
    # Where vLLM calls methods that we override, by what it calls the object there.
    "kv_cache_manager": (
        ["vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler"],
        "scheduler/ledger.py",
    ),
    "connector": (["vllm.v1.core.sched.scheduler"], "connector.py"),
    "kv_connector": (
        [
            "vllm.v1.engine.core",
            "vllm.v1.worker.kv_connector_model_runner_mixin",
            "vllm.v1.worker.gpu.kv_connector",
            "vllm.model_executor.layers.attention.kv_transfer_utils",
        ],
        "connector.py",
    ),
    "scheduler": (["vllm.v1.engine.core"], "scheduler/scheduler.py"),
    "self": (["vllm.v1.core.sched.scheduler"], "scheduler/scheduler.py"),
}


def own_functions(file: str, of: str | None = None) -> dict[str, ast.arguments]:
    """Parameters of the methods in a file of the engine, by name: of all its classes, or of one."""
    return {
        node.name: node.args
        for cls in ast.parse((source.ENGINE / file).read_text()).body
        if isinstance(cls, ast.ClassDef) and of in (None, cls.name)
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }


def accepts(takes: ast.arguments, call: ast.Call) -> bool:
    """Whether a method (its ``self`` apart) can be called like this."""
    names = [argument.arg for argument in (*takes.posonlyargs, *takes.args)][1:]
    by_name = {*names, *(argument.arg for argument in takes.kwonlyargs)}
    fits = len(call.args) <= len(names) or takes.vararg is not None
    required = names[len(call.args) : len(names) - len(takes.defaults)]
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    is_spread = any(keyword.arg is None for keyword in call.keywords)
    return fits and (takes.kwarg is not None or given <= by_name) and (is_spread or set(required) <= given)


@pytest.mark.parametrize("owner", CALLERS)
def test_calls_are_accepted_as_they_are_made(owner: str) -> None:
    """By position and by name: a signature may be alike and a call another one."""
    modules, file = CALLERS[owner]
    ours, seen = own_functions(file), 0
    for module in modules:
        for call in (
            x for x in ast.walk(source.tree(module) or ast.Module([], [])) if isinstance(x, ast.Call)
        ):
            object_, _, method = ast.unparse(call.func).rpartition(".")
            if object_.rpartition(".")[2] != owner or method not in ours:
                continue
            seen += 1
            if not accepts(ours[method], call):
                source.broken(
                    f"{module} calls {ast.unparse(call)}", f"ours takes ({ast.unparse(ours[method])})"
                )
    assert seen, f"nothing of {file} is called"


OURS: dict[tuple[str, str], tuple[list[str], str]] = {
    # Our classes, by file: the vLLM classes that they extend, and all that they have of theirs.
    ("connector.py", "EvictionConnector"): (
        [f"{BASE}:KVConnectorBase_V1"],
        "__init__ register_kv_caches get_handshake_metadata build_connector_worker_meta start_load_kv "
        "wait_for_layer_load save_kv_layer wait_for_save bind_kv_cache_manager set_xfer_handshake_metadata_pp_aware "
        "build_connector_meta update_connector_output get_kv_connector_stats has_pending_block_frees "
        "get_num_new_matched_tokens update_state_after_alloc build_kv_connector_stats build_prom_metrics",
    ),
    ("scheduler/ledger.py", "PageLedger"): (
        [f"{MANAGER}:KVCacheManager"],
        "__init__ new_step_starts allocate_slots get_computed_blocks reset_prefix_cache estimate_cached_tokens usage "
        "free pop_blocks_for_free cache_blocks take_kv_cache_block_copies remove_skipped_blocks get_blocks",
    ),
    ("scheduler/other_layers.py", "OtherLayers"): ([f"{MANAGER}:KVCacheManager"], "__init__"),
    ("scheduler/blocks.py", "NoBlocks"): ([f"{MANAGER}:KVCacheBlocks"], "get_block_ids"),
    ("scheduler/scheduler.py", "EvictionScheduler"): (
        [SCHEDULER],
        "__init__ add_request schedule has_requests reset_prefix_cache update_from_output finish_requests "
        "_handle_blocked_waiting_request _mamba_block_aligned_split _reserve_prefill_lookahead",
    ),
    ("worker/worker.py", "_EvictionMixin"): (
        ["vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker"],
        "init_device get_kv_cache_spec determine_available_memory initialize_from_config compile_or_warm_up_model "
        "shutdown execute_model sample_tokens",
    ),
    ("worker/attention.py", "RaggedBuilder"): (
        [f"{BACKEND}:AttentionMetadataBuilder"],
        "__init__ build build_for_cudagraph_capture",
    ),
    ("worker/attention.py", "RaggedImpl"): ([f"{BACKEND}:AttentionImpl"], "__init__ forward"),
    ("worker/cuda.py", "RaggedCUDABackend"): (
        [f"{BACKEND}:AttentionBackend"],
        "get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes supports_head_size supports_sink "
        "supports_compute_capability customize_spec",
    ),
    ("worker/cuda.py", "RaggedCUDABuilder"): (
        [f"{BACKEND}:AttentionMetadataBuilder"],
        "get_cudagraph_support",
    ),
    ("worker/cpu.py", "RaggedCPUBackend"): (
        [f"{BACKEND}:AttentionBackend"],
        "get_impl_cls get_builder_cls get_supported_kernel_block_sizes customize_spec",
    ),
    ("spec.py", "BoundedAttentionSpec"): (
        ["vllm.v1.kv_cache_interface:AttentionSpec"],
        "max_memory_usage_bytes prefix_cacheable",
    ),
    ("spec.py", "NoBlocksManager"): (
        ["vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"],
        "get_num_blocks_to_allocate allocate_new_blocks",
    ),
    ("messages.py", "WorkerMessages"): ([f"{BASE}:KVConnectorWorkerMetadata"], "aggregate"),
    ("metrics.py", "EvictionStats"): ([f"{METRICS}:KVConnectorStats"], "aggregate reduce is_empty reset"),
    ("metrics.py", "EvictionPromMetrics"): ([f"{METRICS}:KVConnectorPromMetrics"], "__init__ observe"),
}
ELSEWHERE = {("connector.py", "EvictionConnector"): (f"{BASE}:SupportsHMA", "request_finished_all_groups")}
"""A second class of vLLM's that one of them extends."""
MADE_BY_US = {"PageLedger", "OtherLayers", "EvictionPromMetrics"}
"""Classes whose constructor vLLM does not call by names."""


def takes_as_much(ours: ast.arguments, theirs: list[str]) -> bool:
    """Whether what vLLM's function (its ``self`` apart) can be called with, ours can be called with as well."""
    names = [x.arg for x in (*ours.posonlyargs, *ours.args) if x.arg not in ("self", "cls")]
    if ours.vararg:
        return names == theirs[: len(names)]
    names += [x.arg for x in ours.kwonlyargs] + ([f"**{ours.kwarg.arg}"] if ours.kwarg else [])
    required = len(names) - len(ours.defaults) - sum(x is not None for x in ours.kw_defaults)
    return names[: len(theirs)] == theirs and len(theirs) >= required


@pytest.mark.parametrize("ours", OURS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_what_we_override_is_there_and_takes_no_more(ours: tuple[str, str]) -> None:
    """An override of what vLLM no longer has would never be called, and a new parameter would end the call."""
    (file, name), (places, listed) = ours, OURS[ours]
    methods = own_functions(file, name)
    pairs = [(place, listed.split()) for place in places]
    if ours in ELSEWHERE:
        pairs.append((ELSEWHERE[ours][0], ELSEWHERE[ours][1].split()))
    for place, expected in pairs:
        common = methods.keys() & source.members(place)
        if common != {*expected}:
            source.broken(f"{file} and {place} differ in {', '.join(sorted(common ^ {*expected}))}")
        for method in common - {"__init__"} if name in MADE_BY_US else common:
            theirs = source.parameters(f"{place}.{method}")
            if not takes_as_much(methods[method], theirs):
                source.broken(
                    f"{place}.{method} takes ({', '.join(theirs)}), ours ({ast.unparse(methods[method])})"
                )
