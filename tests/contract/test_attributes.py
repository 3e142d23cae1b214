"""Attributes and fields that we read or set on vLLM's objects."""

import ast

import pytest

from tests.contract import source

ATTRIBUTES: dict[str, str] = {
    "vllm.engine.arg_utils:EngineArgs": (
        "enable_prefix_caching speculative_config spec_method spec_model spec_tokens kv_transfer_config "
        "kv_offloading_size kv_events_config ec_transfer_config scheduler_cls worker_cls attention_backend "
        "attention_config aux_output_config enable_sleep_mode enable_dbo ubatch_size enable_elastic_ep "
        "decode_context_parallel_size prefill_context_parallel_size kv_cache_dtype "
        "kv_sharing_fast_prefill distributed_executor_backend additional_config max_num_seqs max_num_active_seqs "
        "max_num_batched_tokens max_num_scheduled_tokens disable_chunked_mm_input _api_process_count "
        "_api_process_rank watermark kv_cache_memory_bytes"
    ),
    "vllm.config.attention:AttentionConfig": "backend backend_per_kind use_non_causal",
    "vllm.config.aux_output:AuxOutputConfig": "enabled",
    "vllm.config:KVEventsConfig": "enable_kv_cache_events",
    "vllm.config:ModelConfig": (
        "hf_text_config runner_type is_encoder_decoder is_diffusion is_mm_prefix_lm is_attention_free is_hybrid "
        "use_mla uses_alibi get_sliding_window attention_chunk_size has_noops model dtype max_model_len "
        "get_total_num_hidden_layers get_num_kv_heads get_total_num_kv_heads get_layers_start_end_indices "
        "get_num_attention_heads get_head_size model_arch_config"
    ),
    "vllm.config.model_arch:ModelArchitectureConfig": "per_layer_overrides",
    "vllm.config:CacheConfig": (
        "cache_dtype block_size num_gpu_blocks sliding_window kv_cache_memory_bytes gpu_memory_utilization"
    ),
    "vllm.config:ParallelConfig": (
        "pipeline_parallel_size rank data_parallel_size data_parallel_size_local data_parallel_rank_local "
        "local_engines_only use_ray"
    ),
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:SchedulerConfig": (
        "scheduler_cls async_scheduling max_num_seqs max_num_active_seqs max_num_batched_tokens "
        "max_num_scheduled_tokens long_prefill_token_threshold get_scheduler_cls"
    ),
    "vllm.config:VllmConfig": (
        "additional_config model_config cache_config parallel_config scheduler_config compilation_config "
        "speculative_config quant_config num_lookahead_tokens attention_config"
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig": (
        "kv_cache_scheme"
    ),
    "vllm.platforms.interface:Platform": "is_cpu is_cuda device_name ray_device_key _align_hybrid_block_size",
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "vllm_config kv_cache_config max_model_len block_size hash_block_size log_stats max_num_scheduled_tokens "
        "num_spec_tokens connector kv_cache_manager requests running waiting finished_req_ids pause_state policy "
        "use_eagle_block_drop num_prefill_lookahead"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "max_model_len num_kv_cache_groups empty_kv_cache_blocks usage",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    "vllm.v1.request:Request": (
        "request_id num_computed_tokens num_tokens num_prompt_tokens max_tokens num_preemptions sampling_params "
        "prompt_token_ids num_output_tokens num_stale_output_tokens client_index trace_headers "
        "has_encoder_inputs shared_prefix_boundary"
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "retention_interval single_type_managers eagle_group_ids scheduler_block_size"
    ),
    "vllm.v1.engine:EngineCoreRequest": "resumable sampling_params prompt_token_ids prompt_embeds mm_features",
    "vllm.sampling_params:SamplingParams": "extra_args max_tokens min_tokens temperature",
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens finished_req_ids "
        "preempted_req_ids kv_connector_metadata"
    ),
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids num_computed_tokens",
    "vllm.v1.sample.rejection_sampler:RejectionSampler": "sampler",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "num_draft_tokens",
    "vllm.config:SpeculativeConfig": (
        "method num_speculative_tokens draft_model_config draft_parallel_config parallel_drafting kv_cache_dtype"
    ),
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta kv_connector_stats",
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc_cpu num_reqs num_actual_tokens max_query_len req_idx"
    ),
    "vllm.v1.attention.backend:AttentionBackend": (
        "supported_dtypes supported_kv_cache_dtypes forward_includes_kv_cache_update"
    ),
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    "vllm.v1.attention.backend:AttentionCGSupport": "UNIFORM_SINGLE_TOKEN_DECODE NEVER",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM get_path",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole": "SCHEDULER WORKER",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "role requires_kv_delivery",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": (
        "_counter_cls _gauge_cls _histogram_cls per_engine_labelvalues"
    ),
    "vllm.distributed.parallel_state:GroupCoordinator": "world_size device_group rank_in_group is_first_rank",
    "vllm.model_executor.layers.attention:Attention": (
        "layer_name num_heads num_kv_heads head_size impl kv_sharing_target_layer_name"
    ),
    "vllm.model_executor.layers.linear:RowParallelLinear": "quant_method input_size_per_partition params_dtype",
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase": "cos_sin_cache is_neox_style",
    "vllm.model_executor.layers.rotary_embedding.linear_scaling_rope:LinearScalingRotaryEmbedding": "scaling_factors",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size num_kv_heads head_size dtype page_size_bytes",
    **{
        worker: "vllm_config model_runner"
        for worker in ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker")
    },
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "input_batch model intermediate_tensors max_num_tokens model_config device drafter _is_uniform_decode"
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "req_states model device speculator gather_batch_req_state",
    "vllm.v1.worker.gpu.states:RequestState": "index_to_req_id",
    "vllm.v1.engine.async_llm:AsyncLLM": "vllm_config renderer output_handler output_processor",
    "vllm.v1.engine.input_processor:InputProcessor": "vllm_config renderer",
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin": "engine_client",
    "vllm.renderers.base:BaseRenderer": (
        "config tokenizer _executor default_chat_tok_params render_messages tokenize_prompt mm_processor_cache"
    ),
    "vllm.inputs.engine:MultiModalInput": "mm_placeholders mm_hashes",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length",
    "vllm.multimodal.cache.base:BaseMultiModalProcessorCache": "invalidate",
    "vllm.entrypoints.llm:LLM": "renderer llm_engine reset_prefix_cache",
    # In the module of the flags of vllm serve.
    f"{source.moves().make_arg_parser.partition(':')[0]}:BaseFrontendArgs": (
        "chat_template chat_template_content_format default_chat_template_kwargs trust_request_chat_template"
    ),
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "tools build_chat_params",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest": "token_ids sampling_params",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateResponseBase": "prompt_logprobs",
    "vllm.renderers.params:ChatParams": "chat_template_kwargs with_defaults",
    "vllm.renderers.params:TokenizeParams": (
        "truncate_prompt_tokens max_truncation_tokens return_token_offsets with_kwargs"
    ),
}


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_attributes_exist(place: str) -> None:
    members = source.members(place)
    missing = [name for name in ATTRIBUTES[place].split() if name not in members]
    if missing:
        source.broken(f"{place} has no {', '.join(missing)}")


def test_runners_can_be_told_apart() -> None:
    """``engine/worker/model_runners.py`` takes a runner that has ``req_states`` for V2."""
    if "req_states" in source.members("vllm.v1.worker.gpu_model_runner:GPUModelRunner"):
        source.broken("the V1 model runner has req_states", "it is taken for V2, and every step fails")


READ = {
    # Where refusals read attributes, by file: of what, in which functions, by which name.
    "frontend/checks.py": [
        ("vllm.engine.arg_utils:EngineArgs", "check_arguments _conflicts", "args"),
        ("vllm.config:ModelConfig", "check_model _unsupported_kinds", "model"),
    ],
    "frontend/plugin.py": [("vllm.engine.arg_utils:EngineArgs", "_make_room_for_extra_rows", "args")],
}


@pytest.mark.parametrize("file", READ)
def test_attributes_that_refusals_read_are_in_the_table(file: str) -> None:
    functions = {
        x.name: x
        for x in ast.parse((source.ENGINE / file).read_text()).body
        if isinstance(x, ast.FunctionDef)
    }
    for place, names, owner in READ[file]:
        read = {
            x.attr
            for name in names.split()
            for x in ast.walk(functions[name])
            if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == owner
        }
        assert read and read - {"_set_default_max_num_seqs_and_batched_tokens_args"} <= {
            *ATTRIBUTES[place].split()
        }


def test_spec_can_be_copied_field_by_field() -> None:
    """A frozen dataclass whose fields are all keywords, or our copy of a layer's spec loses something."""
    breaks = "workers do not start"
    node = source.find("vllm.v1.kv_cache_interface:FullAttentionSpec", breaks)[1]
    assert isinstance(node, ast.ClassDef)
    decorators = [ast.unparse(x) for x in node.decorator_list]
    if not any("dataclass" in x and "frozen=True" in x for x in decorators):
        source.broken(f"FullAttentionSpec is decorated with {decorators}", breaks)


def test_step_can_be_extended() -> None:
    """take adds its probe to a finished SchedulerOutput."""
    node = source.find("vllm.v1.core.sched.output:SchedulerOutput")[1]
    assert isinstance(node, ast.ClassDef)
    if any("frozen=True" in ast.unparse(x) for x in node.decorator_list):
        source.broken("SchedulerOutput is frozen", "take cannot send its probe")
