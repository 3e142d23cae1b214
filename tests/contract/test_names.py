"""Names that the engine imports from vLLM: each exists, and none is imported that this table does not explain."""

import ast
import dataclasses

import pytest

from tests.contract import source
from vllm_kvevict.engine import versions

NAMES = {
    "vllm:_custom_ops": "CPU attention has no operators to call",
    "vllm:LLM": "vllm-kvevict inspect starts no engine",
    "vllm:SamplingParams": "vllm-kvevict inspect asks for nothing",
    "vllm:envs": "settings in environment variables cannot be refused or followed",
    "vllm.config:CacheConfig": "servers on CPUs do not start",
    "vllm.config:KVTransferConfig": "scheduler and workers get no channel; --kv-eviction cannot start",
    "vllm.config:ParallelConfig": "vllm-kvevict sizing knows no model",
    "vllm.config:VllmConfig": "the plugin cannot read the server's configuration",
    "vllm.config:get_current_vllm_config_or_none": "on GPUs the page size is not known when blocks are chosen",
    "vllm.config:set_current_vllm_config": "on GPUs FlashAttention's version cannot be asked for",
    "vllm.distributed:get_pp_group": "workers do not know which layers of the model are theirs",
    "vllm.distributed:get_tp_group": "heads of different tensor-parallel ranks cannot compete",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": "there is no channel to build on",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorHandshakeMetadata": "pools cannot be announced",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata": "plans cannot be sent to workers",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole": "both ends of the channel look alike",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata": "workers cannot report",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": "vLLM refuses or restricts the connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": "/metrics has no eviction metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": "statistics do not reach the front-end",
    "vllm.distributed.kv_transfer:ensure_kv_transfer_shutdown": "engines that follow a failed start in one process die",
    "vllm.distributed.parallel_state:get_pp_group": "eager CPU servers with pipeline parallelism fail at their start",
    "vllm.distributed.utils:get_pp_indices": "the memory of pipeline stages cannot be computed",
    "vllm.engine.arg_utils:AsyncEngineArgs": "vllm serve does not know --kv-eviction",
    "vllm.engine.arg_utils:EngineArgs": "LLM(...) does not know kv_eviction=",
    "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin": "LLM.beam_search is not refused",
    "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin": "beam search over HTTP is not refused",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "inspect --chat cannot render chats",
    "vllm.entrypoints.openai.parser.harmony_utils:Message": "chats of gpt-oss models cannot go on with a reply",
    "vllm.entrypoints.openai.parser.harmony_utils:Role": "the question of a gpt-oss model's chat is not found",
    "vllm.entrypoints.openai.parser.harmony_utils:get_user_message": "their chats get no other question",
    "vllm.entrypoints.openai.parser.harmony_utils:render_for_completion": "their chats are not rendered again",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses": "streamed /v1/responses are not checked",
    "vllm.entrypoints.launchers.render:entry": "vllm launch render does not follow --kv-eviction",
    "vllm.entrypoints.scale_out.render.serving:ServingRender": "rendered chats lose where their question begins",
    "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest": "rendered chats lose where it begins",
    "vllm.exceptions:VLLMClientError": "a chat template that refuses a probe question fails the request",
    "vllm.exceptions:VLLMValidationError": "bad kv_* fields are answered with HTTP 500 instead of 400",
    "vllm.logger:init_logger": "the plugin cannot be imported",
    "vllm.model_executor.layers.attention:Attention": "workers cannot read the layers' shapes",
    "vllm.model_executor.layers.linear:RowParallelLinear": "criticalkv and defensivekv find no projection",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": "quantized projections are not told apart",
    **{
        f"vllm.model_executor.layers.rotary_embedding.{name}": "compactor and expected-attention cannot undo RoPE"
        for name in (
            "base:RotaryEmbedding",
            "base:RotaryEmbeddingBase",
            "dynamic_ntk_alpha_rope:DynamicNTKAlphaRotaryEmbedding",
            "dynamic_ntk_scaling_rope:DynamicNTKScalingRotaryEmbedding",
            "linear_scaling_rope:LinearScalingRotaryEmbedding",
            "llama3_rope:Llama3RotaryEmbedding",
            "ntk_scaling_rope:NTKScalingRotaryEmbedding",
            "yarn_scaling_rope:YaRNScalingRotaryEmbedding",
        )
    },
    "vllm.model_executor.models.utils:extract_layer_index": "layers cannot be put in order",
    "vllm.platforms:current_platform": "the plugin does not know whether it runs on a CPU or a GPU",
    "vllm.platforms.interface:DeviceCapability": "GPUs that are too old are not refused",
    "vllm.renderers:renderer_from_config": "vllm-kvevict inspect cannot count the tokens of a prompt",
    "vllm.renderers.base:BaseRenderer": "scope=prefix cannot find where a chat's question begins",
    "vllm.renderers.online_renderer:OnlineRenderer": "chats of gpt-oss models are refused under scope=prefix",
    "vllm.renderers.chat_utils:load_chat_template": "inspect --chat-template cannot be read",
    "vllm.renderers.params:TokenizeParams": "what a model is asked when it repeats a prefix has no tokens",
    "vllm.v1.core.block_pool:BlockPool": "blocks cannot be shared with layers that are not evicted",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "blocks cannot be shared with layers that are not evicted",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "evicted layers get blocks, too",
    "vllm.v1.kv_cache_interface:MambaSpec": "groups of layers cannot be foreseen",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "groups of layers cannot be foreseen",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "groups of layers cannot be foreseen",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": "evicted layers get blocks, too",
    "vllm.sampling_params:SamplingParams": "requests' vllm_xargs cannot be read",
    "vllm.usage.usage_lib:UsageContext": "vllm-kvevict doctor configures what vllm serve would not",
    "vllm.utils:length_from_prompt_token_ids_or_embeds": "the length of a prompt is not known when it is checked",
    "vllm.utils.argparse_utils:FlexibleArgumentParser": "vllm-kvevict doctor cannot read the flags of vllm serve",
    "vllm.utils.async_utils:run_in_loop": "who waits when a server is stopped is told nothing",
    "vllm.utils.cpu_resource_utils:get_allowed_cpu_list": "servers on CPUs do not start",
    "vllm.utils.cpu_resource_utils:get_memory_node_info": "servers on CPUs do not start",
    "vllm.utils.cpu_resource_utils:get_visible_memory_node": "servers on CPUs do not start",
    "vllm.utils.hashing:get_hash_fn_by_name": "prefixes cannot be told apart",
    "vllm.utils.ompmultiprocessing:OMPProcessManager": "vllm-kvevict doctor does not see that ranks find no NUMA node",
    "vllm.utils.math_utils:cdiv": "the ledger cannot be imported",
    "vllm.v1.attention.backend:AttentionBackend": "there is no attention backend for GPUs",
    "vllm.v1.attention.backend:AttentionCGSupport": "CUDA graphs of decodes cannot be announced",
    "vllm.v1.attention.backend:AttentionImpl": "there is no attention layer to build on",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "steps cannot be laid out",
    "vllm.v1.attention.backend:AttentionType": "models with encoder attention are not refused",
    "vllm.v1.attention.backend:MultipleOf": "on GPUs block sizes cannot be chosen to fit pages",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "there is no attention backend for CPUs",
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "the order of CPU pages cannot be found out",
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func": "prompts on GPUs have no attention",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version": "FlashAttention cannot be chosen on GPUs",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "our backend has no place to go",
    "vllm.v1.attention.backends.registry:register_backend": "our backend cannot be registered",
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": "fp32 prompts on GPUs have no attention",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": "salts and adapters do not tell prefixes apart",
    "vllm.v1.core.kv_cache_utils:hash_block_tokens": "prefixes cannot be told apart",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "the ledger cannot answer the scheduler",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "the ledger cannot stand in for the block manager",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "asynchronous scheduling, the GPUs' default, has no eviction",
    "vllm.v1.core.sched.interface:PauseState": "prompts are repeated while a server is paused",
    "vllm.v1.core.sched.output:CachedRequestData": "workers cannot read a step",
    "vllm.v1.core.sched.output:NewRequestData": "take cannot send its probe",
    "vllm.v1.core.sched.output:SchedulerOutput": "workers cannot read a step",
    "vllm.v1.core.sched.request_queue:SchedulingPolicy": "priorities count where vLLM does not look at them",
    "vllm.v1.core.sched.scheduler:Scheduler": "there is no scheduler to build on",
    "vllm.v1.engine.async_llm:AsyncLLM": "streams with bad fields begin with status 200",
    "vllm.v1.engine.exceptions:EngineDeadError": "who waits when a server is stopped is told nothing",
    "vllm.v1.engine.input_processor:InputProcessor": "requests are not checked before they reach the engine",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "vLLM asks for more KV memory than eviction needs",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "the connector cannot be built",
    "vllm.v1.sample:rejection_sampler": "with ngram on a CPU requests are sampled wrongly",
    "vllm.v1.outputs:KVConnectorOutput": "reports cannot be read",
    "vllm.v1.request:Request": "the ledger cannot read requests",
    "vllm.v1.request:RequestStatus": "requests that cannot go on are never ended",
    "vllm.v1.engine:EngineCoreOutput": "clients of requests that the scheduler ended wait for ever",
    "vllm.v1.engine:EngineCoreOutputs": "clients of requests that the scheduler ended wait for ever",
    "vllm.v1.worker.cpu_worker:CPUWorker": "there is no CPU worker to build on",
    "vllm.v1.worker.gpu_worker:Worker": "there is no GPU worker to build on",
    "vllm.version:__version__": "untested versions of vLLM are not refused",
}

ENVIRONMENT = {
    "VLLM_USE_RUST_FRONTEND": "a front-end that checks no request is not refused",
    "VLLM_CPU_ATTN_SPLIT_KV": "CPU attention fails at the first step",
    "VLLM_CPU_KVCACHE_SPACE": "the README's way to size the KV memory of CPUs does nothing",
    "VLLM_CPU_OMP_THREADS_BIND": "two ranks on one NUMA node cannot be started as the README says",
    "VLLM_USE_V2_MODEL_RUNNER": "the model runner cannot be chosen as docs/GPU.md says",
}


MOVED = {
    # Names that lie elsewhere in other versions, by the field that says where they are here.
    "groups_of_one_page_size": "groups of layers cannot be foreseen",
    "max_memory_usage_bytes": "vLLM refuses prompts that eviction makes fit",
    "make_arg_parser": "vllm-kvevict doctor and inspect cannot read the flags of vllm serve",
    "parse_media_part": "scope=prefix loads images once more",
    "media_parser": "scope=prefix loads images once more",
}
RAY_VARIABLE = "the Ray executor that bypasses the worker is not refused"


def imported() -> set[str]:
    """What the engine's modules import from vLLM."""
    return {
        f"{node.module}:{alias.name}"
        for file in source.ENGINE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def test_table_has_what_the_engine_imports() -> None:
    """A new import without an entry would be a seam that nobody judges."""
    assert imported() == set(NAMES)


@pytest.mark.parametrize("place", NAMES)
def test_name_exists(place: str) -> None:
    source.find(place, NAMES[place])


@pytest.mark.parametrize("field", MOVED)
def test_moved_name_exists(field: str) -> None:
    source.find(getattr(source.moves(), field), MOVED[field])


def test_table_has_what_moved() -> None:
    fields = {field.name for field in dataclasses.fields(versions.Moves)}
    assert fields == {*MOVED, "ray_executor_variable"}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_variable_is_known(name: str) -> None:
    if not is_variable(name):
        source.broken(f"vllm.envs does not know {name}", ENVIRONMENT[name])


def is_variable(name: str) -> bool:
    """Whether vLLM knows an environment variable of this name."""
    module = source.module_file("vllm.envs")
    return module is not None and f'"{name}"' in module.read_text(encoding="utf-8")


def test_ray_executors_are_told_apart() -> None:
    """Where vLLM has two Ray executors, the variable between them is known; where it has one, there is none."""
    name = source.moves().ray_executor_variable
    two = source.module_file("vllm.v1.executor.ray_executor") is not None
    if two != (name is not None) or (name is not None and not is_variable(name)):
        source.broken(f"vLLM has {1 + two} Ray executors, and the variable is {name}", RAY_VARIABLE)
