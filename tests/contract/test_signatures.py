"""Functions that vLLM calls and we define, and functions that we call and vLLM defines."""

import ast

import pytest

from tests.contract import source

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
MANAGER = "vllm.v1.core.kv_cache_manager"
BACKEND = "vllm.v1.attention.backend"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
WORKERS = ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker")

OVERRIDDEN: dict[str, tuple[str, str]] = {
    # What vLLM passes must be what ours accepts: the parameters are compared one by one.
    f"{SCHEDULER}.schedule": ("throttle_prefills", "take sends no probe"),
    f"{SCHEDULER}.add_request": ("request", "priorities count where vLLM does not look at them"),
    f"{SCHEDULER}.update_from_output": (
        "scheduler_output model_runner_output",
        "clients of requests that the scheduler ended wait for ever",
    ),
    f"{SCHEDULER}.has_requests": ("", "an idle engine does not tell its workers which prefixes to drop"),
    f"{SCHEDULER}.finish_requests": (
        "request_ids finished_status",
        "requests that cannot go on are never ended",
    ),
    f"{SCHEDULER}.reset_prefix_cache": (
        "reset_running_requests reset_connector",
        "what requests kept with older weights is expected of the new ones",
    ),
    f"{SCHEDULER}._handle_blocked_waiting_request": (
        "request",
        "nobody begins behind a request with prompt_logprobs that waits for the reserve",
    ),
    f"{SCHEDULER}._reserve_prefill_lookahead": (
        "request num_computed_tokens num_new_tokens",
        "chunks cross eviction positions, so later tokens see KV that should be gone",
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "metadata draft_probs logits sampling_metadata",
        "with ngram no step can be sampled",
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x cu_num_tokens num_tokens replace_from replace_to",
        "with ngram on a CPU tokens are drawn by values that nobody set",
    ),
    f"{MANAGER}:KVCacheManager.new_step_starts": (
        "",
        "no prompt whose policy needs the reserve follows another",
    ),
    f"{MANAGER}:KVCacheManager.free": ("request", "pages of finished requests are never returned"),
    f"{MANAGER}:KVCacheManager.pop_blocks_for_free": (
        "request",
        "pages of finished requests are never returned",
    ),
    f"{MANAGER}:KVCacheManager.get_blocks": ("request_id", "the scheduler reads blocks that do not exist"),
    f"{MANAGER}:KVCacheManager.estimate_cached_tokens": ("request", "admission reads vLLM's own accounts"),
    f"{MANAGER}:KVCacheManager.reset_prefix_cache": ("", "cached prefixes outlive a reset"),
    f"{MANAGER}:KVCacheManager.cache_blocks": (
        "request num_computed_tokens",
        "asynchronous scheduling fails",
    ),
    f"{MANAGER}:KVCacheManager.remove_skipped_blocks": (
        "request_id processed_computed_tokens num_prompt_tokens",
        "requests fail when they end",
    ),
    f"{MANAGER}:KVCacheBlocks.get_block_ids": (
        "allow_none group_ids",
        "resumed requests fail on block ids that are None",
    ),
    f"{BASE}:KVConnectorBase_V1.__init__": ("vllm_config role kv_cache_config", "no engine starts"),
    f"{BASE}:KVConnectorBase_V1.register_kv_caches": ("kv_caches", "workers get no memory for pages"),
    f"{BASE}:KVConnectorBase_V1.get_handshake_metadata": ("", "the ledger never learns the pools' sizes"),
    f"{BASE}:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware": (
        "metadata",
        "the ledger never learns the pools' sizes",
    ),
    f"{BASE}:KVConnectorBase_V1.build_connector_worker_meta": ("", "workers' reports get lost"),
    f"{BASE}:KVConnectorBase_V1.start_load_kv": ("forward_context **kwargs", "steps fail"),
    f"{BASE}:KVConnectorBase_V1.wait_for_layer_load": ("layer_name", "steps fail"),
    f"{BASE}:KVConnectorBase_V1.save_kv_layer": ("layer_name kv_layer attn_metadata **kwargs", "steps fail"),
    f"{BASE}:KVConnectorBase_V1.wait_for_save": ("", "steps fail"),
    f"{BASE}:KVConnectorBase_V1.bind_kv_cache_manager": ("kv_cache_manager", "the connector has no ledger"),
    f"{BASE}:KVConnectorBase_V1.build_connector_meta": ("scheduler_output", "workers get no plans"),
    f"{BASE}:KVConnectorBase_V1.update_connector_output": ("connector_output", "the ledger hears no report"),
    f"{BASE}:KVConnectorBase_V1.get_kv_connector_stats": ("", "/metrics stays at zero"),
    f"{BASE}:KVConnectorBase_V1.has_pending_block_frees": (
        "",
        "decodes are preempted although pages come back",
    ),
    f"{BASE}:KVConnectorBase_V1.get_num_new_matched_tokens": (
        "request num_computed_tokens",
        "admission fails",
    ),
    f"{BASE}:KVConnectorBase_V1.update_state_after_alloc": (
        "request blocks num_external_tokens",
        "admission fails",
    ),
    f"{BASE}:SupportsHMA.request_finished_all_groups": ("request block_ids", "requests fail when they end"),
    f"{BASE}:KVConnectorBase_V1.build_kv_connector_stats": ("data", "/metrics stays at zero"),
    f"{BASE}:KVConnectorBase_V1.build_prom_metrics": (
        "vllm_config metric_types labelnames per_engine_labelvalues",
        "the server does not start",
    ),
    f"{BASE}:KVConnectorWorkerMetadata.aggregate": ("other", "reports of several ranks are not joined"),
    f"{METRICS}:KVConnectorStats.aggregate": ("other", "statistics of several steps are not joined"),
    f"{METRICS}:KVConnectorStats.reduce": ("", "the periodic log line fails"),
    f"{METRICS}:KVConnectorStats.is_empty": ("", "statistics are not sent"),
    f"{METRICS}:KVConnectorStats.reset": ("", "statistics are counted twice"),
    f"{METRICS}:KVConnectorPromMetrics.__init__": (
        "vllm_config metric_types labelnames per_engine_labelvalues",
        "the server does not start",
    ),
    f"{METRICS}:KVConnectorPromMetrics.observe": ("transfer_stats_data engine_idx", "/metrics stays at zero"),
    f"{BACKEND}:AttentionMetadataBuilder.__init__": (
        "kv_cache_spec layer_names vllm_config device",
        "workers fail",
    ),
    f"{BACKEND}:AttentionMetadataBuilder.build": (
        "common_prefix_len common_attn_metadata fast_build",
        "steps fail",
    ),
    f"{BACKEND}:AttentionMetadataBuilder.build_for_cudagraph_capture": (
        "common_attn_metadata",
        "CUDA graphs capture pages of live requests",
    ),
    f"{BACKEND}:AttentionMetadataBuilder.get_cudagraph_support": (
        "vllm_config kv_cache_spec",
        "GPU servers fail or lose CUDA graphs",
    ),
    f"{BACKEND}:AttentionImpl.__init__": (
        "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name",
        "models fail to load, or lose a property that we should refuse",
    ),
    f"{BACKEND}:AttentionImpl.forward": (
        "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        "steps fail",
    ),
    f"{BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": (
        "kv_cache_spec",
        "GPU servers choose blocks that pages do not divide",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end",
        "requests of models with layers of several kinds are admitted that do not fit",
    ),
    f"{MANAGERS}:FullAttentionManager.get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end",
        "evicted layers get blocks beside their pages",
    ),
    f"{MANAGERS}:FullAttentionManager.allocate_new_blocks": (
        "request_id num_tokens num_tokens_main_model",
        "evicted layers get blocks beside their pages",
    ),
    f"{BACKEND}:AttentionBackend.supports_sink": ("", "GPU servers of models with sinks do not start"),
    f"{BACKEND}:AttentionBackend.supports_head_size": ("head_size", "GPU servers do not start"),
    f"{BACKEND}:AttentionBackend.supports_compute_capability": ("capability", "GPU servers do not start"),
    f"{BACKEND}:AttentionBackend.get_name": ("", "GPU servers do not start"),
    f"{BACKEND}:AttentionBackend.get_impl_cls": ("", "vLLM uses its own attention"),
    f"{BACKEND}:AttentionBackend.get_builder_cls": ("", "vLLM uses its own metadata"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": (
        "vllm_config",
        "vLLM refuses prompts that eviction makes fit",
    ),
    **{f"{worker}.init_device": ("", "workers do not use our attention") for worker in WORKERS},
    **{
        f"{worker}.get_kv_cache_spec": ("", "vLLM refuses prompts that eviction makes fit")
        for worker in WORKERS
    },
    **{
        f"{worker}.determine_available_memory": ("", "vLLM gives the reserve's memory to the KV cache")
        for worker in WORKERS
    },
    **{f"{worker}.initialize_from_config": ("kv_cache_config", "workers do not start") for worker in WORKERS},
    **{
        f"{worker}.compile_or_warm_up_model": ("", "the first GPU request waits for compilers")
        for worker in WORKERS
    },
    **{
        f"{worker}.shutdown": ("", "a process that outlives its engine keeps the KV memory")
        for worker in WORKERS
    },
    **{
        f"{worker}.execute_model": ("scheduler_output", "no page is ever opened or freed")
        for worker in WORKERS
    },
    **{
        f"{worker}.sample_tokens": ("grammar_output", "a seeded request on a CPU ends the engine")
        for worker in WORKERS
    },
}

WRAPPED: dict[str, tuple[str, str]] = {
    # What we replace with a wrapper names these first, in this order; what follows is passed on as it is.
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ("parser", "vllm serve does not know --kv-eviction"),
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": ("args", "--kv-eviction is parsed and forgotten"),
    "vllm.v1.engine.input_processor:InputProcessor.__init__": ("vllm_config", "no engine starts"),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (
        "request_id prompt params",
        "every request fails",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        "prompt sampling_params",
        "streams begin before they are checked",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": (
        "request_id prompt params",
        "every request over HTTP fails",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ("", "a server that is stopped waits for its clients"),
    "vllm.renderers.base:BaseRenderer.render_chat": (
        "conversations chat_params tok_params",
        "LLM.chat fails under scope=prefix",
    ),
    "vllm.renderers.base:BaseRenderer.render_chat_async": (
        "conversations chat_params tok_params",
        "chats over HTTP fail under scope=prefix",
    ),
    "vllm.renderers.online_renderer:OnlineRenderer._make_request_with_harmony": (
        "request should_include_tools",
        "chats of gpt-oss models fail",
    ),
    "vllm.renderers.online_renderer:OnlineRenderer.render_responses_harmony_messages": (
        "messages cache_salt tok_params",
        "responses of gpt-oss models fail",
    ),
    f"{MANAGER}:KVCacheManager.allocate_slots": (
        "request num_new_tokens num_new_computed_tokens",
        "nothing is admitted",
    ),
}

CALLED: dict[str, tuple[str, str]] = {
    # We call these with these names, or with as many values.
    f"{MANAGER}:KVCacheManager.__init__": (
        "kv_cache_config max_model_len max_in_flight_tokens scheduler_block_size hash_block_size enable_caching "
        "log_stats",
        "no engine starts",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.propagate_error": (
        "e",
        "who waits when a server is stopped is told nothing",
    ),
    "vllm.config:KVTransferConfig": ("kv_connector kv_role kv_connector_module_path", "no engine starts"),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids finish_reason events trace_headers",
        "clients of requests that the scheduler ended wait for ever",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id prompt_token_ids prefill_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request",
        "take cannot send its probe",
    ),
    "vllm._custom_ops:cpu_attention_with_kv_cache": (
        "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window "
        "block_table softcap scheduler_metadata s_aux",
        "CPU servers fail at the first prompt",
    ),
    "vllm._custom_ops:cpu_attn_get_scheduler_metadata": (
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal sliding_window_size isa "
        "enable_kv_split",
        "CPU servers fail at the first prompt",
    ),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (
        "key value key_cache value_cache slot_mapping isa",
        "CPU servers fail at the first prompt",
    ),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": (
        "dtype block_size head_size",
        "CPU servers do not start",
    ),
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version": ("head_size", "GPU servers do not start"),
    "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func": (
        "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table softcap "
        "fa_version",
        "GPU servers fail at the first prompt",
    ),
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": (
        "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table softcap "
        "window_size q_descale k_descale v_descale",
        "fp32 servers on GPUs fail at the first prompt",
    ),
    "vllm.v1.attention.backends.registry:register_backend": (
        "backend class_path",
        "our attention is not used",
    ),
    "vllm.distributed.utils:get_pp_indices": (
        "num_hidden_layers pp_rank pp_size",
        "stages' memory is not known",
    ),
    "vllm.exceptions:VLLMValidationError": ("message parameter value", "bad fields end in HTTP 500"),
    "vllm.utils:length_from_prompt_token_ids_or_embeds": ("prompt_token_ids prompt_embeds", "requests fail"),
    "vllm.renderers.base:BaseRenderer.render_messages": ("messages params", "scope=prefix fails"),
    "vllm.renderers.params:TokenizeParams": (
        "max_total_tokens add_special_tokens",
        "what a model is asked when it repeats a prefix has no tokens",
    ),
    "vllm.renderers.base:BaseRenderer.tokenize_prompt": ("prompt params", "scope=prefix fails"),
    "vllm.config:ModelConfig.get_num_kv_heads": ("parallel_config", "memory checks fail"),
    "vllm.config:ModelConfig.get_head_size": ("", "what compactor and expected-attention reserve is unknown"),
    "vllm.config:ModelConfig.get_num_attention_heads": (
        "parallel_config",
        "workers of a server that allows h2o fail",
    ),
    "vllm.config:ModelConfig.get_layers_start_end_indices": ("parallel_config", "workers do not start"),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": (
        "layer x",
        "criticalkv and defensivekv cannot read projections",
    ),
    "vllm.config:set_current_vllm_config": ("vllm_config", "GPU servers do not start"),
    "vllm.engine.arg_utils:EngineArgs.create_model_config": ("", "vllm-kvevict sizing knows no model"),
    "vllm.platforms.interface:Platform._align_hybrid_block_size": (
        "vllm_config backend_cls",
        "vllm-kvevict inspect does not start for models with states",
    ),
    "vllm.renderers:renderer_from_config": ("config", "vllm-kvevict inspect fails"),
}

BY_KEYWORD = {
    # vLLM's calls whose keywords our wrappers read.
    "_generate_with_builtin_tools": (
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
        "engine_input sampling_params",
        "streamed /v1/responses fail or are not checked",
    ),
}


def test_cached_prefixes_are_asked_for() -> None:
    """With the request, and in newer versions with a limit, which ours accepts."""
    place = f"{MANAGER}:KVCacheManager.get_computed_blocks"
    breaks = "no request begins with a cached prefix"
    names = source.parameters(place, breaks)
    if names not in (["request"], ["request", "max_cache_hit_length"]):
        source.broken(f"{place} takes ({', '.join(names)})", breaks)


@pytest.mark.parametrize("place", OVERRIDDEN)
def test_override_matches(place: str) -> None:
    expected, breaks = OVERRIDDEN[place]
    names = source.parameters(place, breaks)
    if names != expected.split():
        source.broken(f"{place} takes ({', '.join(names)}), ours ({', '.join(expected.split())})", breaks)


@pytest.mark.parametrize("place", WRAPPED)
def test_wrapped_function_begins_alike(place: str) -> None:
    expected, breaks = WRAPPED[place]
    names = source.parameters(place, breaks)
    if names[: len(expected.split())] != expected.split():
        source.broken(f"{place} takes ({', '.join(names)}), we expect ({expected}, ...)", breaks)


@pytest.mark.parametrize("place", CALLED)
def test_call_is_accepted(place: str) -> None:
    expected, breaks = CALLED[place]
    names = source.parameters(place, breaks)
    missing = [name for name in expected.split() if name not in names]
    if missing:
        source.broken(f"{place} takes no {', '.join(missing)}", breaks)


@pytest.mark.parametrize("method", BY_KEYWORD)
def test_vllm_calls_by_keyword(method: str) -> None:
    place, keywords, breaks = BY_KEYWORD[method]
    found = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(source.find(place, breaks)[1])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{method}"
    ]
    if not found or not all(set(keywords.split()) <= names for names in found):
        source.broken(f"{place} does not call {method} with keywords {keywords}", breaks)


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
    ours = set(CALLED[f"{MANAGER}:KVCacheManager.__init__"][0].split())
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


def own_functions(file: str) -> dict[str, ast.arguments]:
    """Parameters of the methods in a file of the engine, by name."""
    return {
        node.name: node.args
        for cls in ast.parse((source.ENGINE / file).read_text()).body
        if isinstance(cls, ast.ClassDef)
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


def test_calls_that_are_not_accepted_are_seen() -> None:
    takes = own_functions("scheduler/ledger.py")["get_computed_blocks"]
    calls = {
        "f(request)": True,
        "f(request, 3)": True,
        "f(request, limit=3)": False,
        "f(a, b, c)": False,
        "f()": False,
    }
    for text, fits in calls.items():
        call = ast.parse(text).body[0]
        assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
        assert accepts(takes, call.value) == fits, text


def test_beam_search_can_be_refused() -> None:
    """Beam search restarts requests without their settings: under eviction they would be evicted as the server says."""
    for name in ("online:BeamSearchOnlineMixin", "offline:BeamSearchOfflineMixin"):
        source.find(f"vllm.entrypoints.generate.beam_search.{name}.beam_search", "beam search is not refused")


OURS = {
    # Our classes, by file, and the vLLM classes that they override; what is common to both must be in OVERRIDDEN.
    ("connector.py", "EvictionConnector"): [f"{BASE}:KVConnectorBase_V1", f"{BASE}:SupportsHMA"],
    ("scheduler/ledger.py", "PageLedger"): [f"{MANAGER}:KVCacheManager"],
    ("scheduler/other_layers.py", "OtherLayers"): [f"{MANAGER}:KVCacheManager"],
    ("scheduler/blocks.py", "NoBlocks"): [f"{MANAGER}:KVCacheBlocks"],
    ("scheduler/scheduler.py", "EvictionScheduler"): [SCHEDULER],
    ("worker/worker.py", "_EvictionMixin"): list(WORKERS),
    ("worker/attention.py", "RaggedBuilder"): [f"{BACKEND}:AttentionMetadataBuilder"],
    ("worker/attention.py", "RaggedImpl"): [f"{BACKEND}:AttentionImpl"],
    ("worker/cuda.py", "RaggedCUDABackend"): [f"{BACKEND}:AttentionBackend"],
    ("worker/cuda.py", "RaggedCUDABuilder"): [f"{BACKEND}:AttentionMetadataBuilder"],
    ("worker/cpu.py", "RaggedCPUBackend"): [f"{BACKEND}:AttentionBackend"],
    ("spec.py", "BoundedAttentionSpec"): ["vllm.v1.kv_cache_interface:FullAttentionSpec"],
    ("spec.py", "NoBlocksManager"): [f"{MANAGERS}:FullAttentionManager"],
    ("messages.py", "WorkerMessages"): [f"{BASE}:KVConnectorWorkerMetadata"],
    ("metrics.py", "EvictionStats"): [f"{METRICS}:KVConnectorStats"],
    ("metrics.py", "EvictionPromMetrics"): [f"{METRICS}:KVConnectorPromMetrics"],
}
PASSED_ON = {f"{SCHEDULER}.__init__", f"{MANAGER}:KVCacheManager.__init__"}  # by *args and **kwargs
OPTIONAL = {f"{MANAGER}:KVCacheManager.get_computed_blocks"}  # with an argument that not all versions have
PROPERTIES = {f"{MANAGER}:KVCacheManager.usage"}


@pytest.mark.parametrize("ours", OURS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_table_has_what_we_override(ours: tuple[str, str]) -> None:
    """An override that the table does not have would be a seam that nobody judges."""
    file, name = ours
    own = next(
        node
        for node in ast.parse((source.ENGINE / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    known = {*OVERRIDDEN, *WRAPPED, *PASSED_ON, *PROPERTIES, *OPTIONAL}
    for place in OURS[ours]:
        for method in sorted(methods & source.members(place)):
            if f"{place}.{method}" not in known:
                source.broken(f"{file} overrides {place}.{method}", "nobody judged that; give it an entry")
