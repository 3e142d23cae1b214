"""vLLM 0.33."""

from vllm_kvevict.engine.versions.moves import Moves

MOVES = Moves(
    unify_page_size="vllm.v1.core.kv_cache_planning:unify_kv_cache_spec_page_size",
    groups_of_one_page_size="vllm.v1.core.kv_cache_planning:_get_kv_cache_groups_uniform_page_size",
    max_memory_usage_bytes="vllm.v1.core.kv_cache_planning:max_memory_usage_bytes",
    make_arg_parser="vllm.entrypoints.common.cli_args:make_arg_parser",
    parse_media_part="vllm.renderers.chat_utils.chat_message:parse_chat_message_content_mm_part",
    media_parser="vllm.renderers.chat_utils.content_parser:MultiModalContentParser",
    ray_executor_variable=None,
)
