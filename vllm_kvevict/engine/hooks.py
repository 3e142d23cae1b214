"""Every attribute of vLLM that this package wraps or replaces, and the only function that does it.

Subclasses, and what vLLM lets others register, are not listed: those are vLLM's own doors.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """One attribute.

    Attributes:
        target: ``module:name``, as vLLM names it.
        by: which file of this folder wraps it.
        why: what it is wrapped for.
    """

    target: str
    by: str
    why: str


HOOKS = (
    Hook("vllm.engine.arg_utils:EngineArgs.add_cli_args", "frontend/plugin.py", "our flags"),
    Hook(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args", "frontend/plugin.py", "our flags, for API servers"
    ),
    Hook("vllm.engine.arg_utils:EngineArgs.create_engine_config", "frontend/plugin.py", "our configuration"),
    Hook("vllm.engine.arg_utils:EngineArgs.__init__", "frontend/plugin.py", "our keywords"),
    Hook("vllm.engine.arg_utils:AsyncEngineArgs.__init__", "frontend/plugin.py", "our keywords"),
    Hook(
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        "frontend/plugin.py",
        "buffers for one request more than the scheduler may fill",
    ),
    Hook("vllm.renderers.base:BaseRenderer.render_chat", "frontend/noting.py", "where a chat is evicted"),
    Hook(
        "vllm.renderers.base:BaseRenderer.render_chat_async", "frontend/noting.py", "where a chat is evicted"
    ),
    Hook(
        "vllm.renderers.online_renderer:OnlineRenderer._make_request_with_harmony",
        "frontend/harmony.py",
        "where a chat of gpt-oss is evicted",
    ),
    Hook(
        "vllm.renderers.online_renderer:OnlineRenderer.render_responses_harmony_messages",
        "frontend/harmony.py",
        "where a chat of gpt-oss is evicted",
    ),
    Hook(
        "vllm.entrypoints.scale_out.render.serving:ServingRender.render_chat_request",
        "frontend/rendering.py",
        "what was found in a chat goes along with its tokens",
    ),
    Hook(
        "vllm.entrypoints.scale_out.render.serving:ServingRender.render_responses_request",
        "frontend/rendering.py",
        "what was found in a chat goes along with its tokens",
    ),
    Hook(
        "vllm.entrypoints.launchers.render.entry:init_render_app_state",
        "frontend/rendering.py",
        "the options, in a server without an engine",
    ),
    Hook(
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        "frontend/requests.py",
        "other schedulers refused",
    ),
    Hook(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "frontend/requests.py",
        "requests checked",
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "frontend/requests.py",
        "requests checked before a stream",
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM.add_request",
        "frontend/requests.py",
        "chats rendered once more in vLLM's threads for that",
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
        "frontend/requests.py",
        "beam search refused",
    ),
    Hook(
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "frontend/requests.py",
        "beam search refused",
    ),
    Hook(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "frontend/requests.py",
        "requests checked before a stream",
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM.shutdown",
        "frontend/stopping.py",
        "clients that still wait get an error",
    ),
    Hook(
        "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls", "devices.py", "our backend for evicted layers"
    ),
    Hook(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "worker/model_runners.py",
        "which row is which request, and which steps CUDA graphs must not serve (V2)",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode",
        "worker/model_runners.py",
        "which steps CUDA graphs must not serve (V1)",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        "worker/sampling.py",
        "steps without drafts",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "worker/sampling.py",
        "sampling parameters for each draft, on a CPU",
    ),
)

_TARGETS = frozenset(hook.target for hook in HOOKS)


def wrap(target: str, make: Callable[[Any], Any], of: Any = None) -> None:
    """Put a function in the place of one of vLLM's.

    Args:
        target: of :data:`HOOKS`.
        make: makes it of the one that was there.
        of: an object whose own attribute is replaced; else that of the class or module is, for the whole process.

    Raises:
        KeyError: the target is not listed.
    """
    if target not in _TARGETS:
        raise KeyError(f"{target} is not in HOOKS")
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = of
    if owner is None:
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
    before = getattr(owner, name) if of is not None else inspect.getattr_static(owner, name)
    kind = type(before) if isinstance(before, (classmethod, staticmethod)) else None
    before = before if kind is None else before.__func__
    after = functools.update_wrapper(make(before), before)
    setattr(owner, name, after if kind is None else kind(after))


def before(target: str, check: Callable[..., None]) -> None:
    """Call ``check`` with a method's arguments when it is called, even if it is an asynchronous generator."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return method(*args, **kwargs)

        return checked

    wrap(target, make)
