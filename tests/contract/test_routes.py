"""Every route by which a prompt reaches an engine: each is judged, with scope ``prefix``, too. A new one fails here."""

import ast
import functools
from collections.abc import Iterator

from tests.contract import source

CHAT = "a chat: the server finds its question, or the refusal says why it cannot"
SAID = "no chat: the request says where its prefix ends, or is refused by name"
ONE_TOKEN = "one token is read, so the prompt is kept whole"
SESSION = "resumable sessions are refused"
PASSED_ON = "as the route that it passes the request on to"

GENERATES = {
    "/cohere/v2/chat": CHAT,
    "/generative_scoring": ONE_TOKEN,
    "/inference/v1/generate": SAID,
    "/invocations": PASSED_ON,
    "/v1/audio/transcriptions": SAID,
    "/v1/audio/translations": SAID,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT,
    "/v1/completions": SAID,
    "/v1/decisions": CHAT,
    "/v1/messages": CHAT,
    "/v1/realtime": SESSION,
    "/v1/responses": CHAT,
    "/v1/systemone": CHAT,
}
"""Routes that let an engine answer, and what becomes of them with scope ``prefix``."""

IN_SOME_VERSIONS = {"/v1/decisions"}

RENDERS = {
    "/cohere/v2/chat/render",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
}
"""Routes whose answer is a prompt, which a client sends to ``/inference/v1/generate``."""

OTHERS = {
    "/abort_requests", "/classify", "/collective_rpc", "/detokenize", "/docs", "/fault_tolerance/apply",
    "/fault_tolerance/status", "/finish_weight_update", "/get_world_size", "/health",
    "/inference/v1/abort_requests", "/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep",
    "/is_sleeping", "/kv_event_sources", "/load", "/pause", "/ping", "/pooling", "/ready", "/readyz",
    "/release_kv_cache_memory", "/rerank", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache",
    "/resume", "/scale_elastic_ep", "/score", "/server_info", "/shutdown_weight_transfer_engine", "/sleep",
    "/start_draft_weight_update", "/start_profile", "/start_weight_update", "/stop_profile", "/tokenize",
    "/tokenizer_info", "/update_weight_version", "/update_weights", "/v1/chat/completions/derender",
    "/v1/completions/derender", "/v1/embeddings", "/v1/load_lora_adapter", "/v1/messages/count_tokens",
    "/v1/models", "/v1/rerank", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    "/v1/score", "/v1/unload_lora_adapter", "/v2/embed", "/v2/rerank", "/version", "/wake_up",
    "/weight_checker", "/weight_info",
}  # fmt: skip
"""Routes that send no prompt to an engine that generates."""

CALLERS = {
    "generate.beam_search.online": "refused before it begins",
    "generate.label_reads": "/generative_scoring and /v1/systemone",
    "openai.chat_completion.batch_serving": "/v1/chat/completions/batch",
    "openai.chat_completion.serving": "/v1/chat/completions, and by way of it /v1/messages and /cohere/v2/chat",
    "openai.completion.serving": "/v1/completions",
    "openai.decisions.strategies": "/v1/decisions",
    "openai.responses.serving": "/v1/responses",
    "scale_out.token_in_token_out.serving": "/inference/v1/generate",
    "speech_to_text.base.serving": "/v1/audio/transcriptions and /v1/audio/translations",
    "speech_to_text.realtime.connection": "/v1/realtime",
}
"""Modules of ``vllm.entrypoints`` that call ``AsyncLLM.generate``, and for which routes."""

METHODS = ("api_route", "delete", "get", "post", "put", "websocket")


def calls_generate(tree: ast.Module) -> bool:
    """Whether a module lets an engine generate."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "generate"
        and ast.unparse(node.value).endswith("engine_client")
        for node in ast.walk(tree)
    )


def routes(tree: ast.Module) -> Iterator[str]:
    """The routes that a module's decorators and calls add."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        path, owner = node.args[0], ast.unparse(node.func.value)
        adds = node.func.attr in METHODS and (owner == "app" or owner.endswith("router"))
        if (adds or node.func.attr == "add_api_route") and isinstance(path, ast.Constant):
            yield str(path.value)


@functools.cache
def entrypoints() -> dict[str, ast.Module]:
    """The modules of vLLM's entry points, by name."""
    folder = source.root() / "entrypoints"
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(folder.rglob("*.py"))
    }


def test_every_caller_of_generate_is_known() -> None:
    found = {name for name, tree in entrypoints().items() if calls_generate(tree)}
    for name in sorted(found - {*CALLERS}):
        source.broken(
            f"vllm.entrypoints.{name} calls AsyncLLM.generate", "nobody judged its prompts; give it an entry"
        )
    assert {name for name in CALLERS if name != "openai.decisions.strategies"} <= found


def test_every_route_is_judged() -> None:
    """Prompts of a route that nobody judged may be refused with a sentence that is false, or compressed twice."""
    found = {route for tree in entrypoints().values() for route in routes(tree)}
    for route in sorted(found - {*GENERATES} - RENDERS - OTHERS):
        source.broken(f"vLLM has a route {route}", "nobody judged it; give it an entry")
    for route in sorted({*GENERATES, *RENDERS} - IN_SOME_VERSIONS - found):
        source.broken(f"vLLM has no route {route}", "its entry says what is no longer true")
