"""Every function of vLLM that this package wraps or replaces, and the only code that does it.

Subclasses, and what vLLM lets others register, are not listed: those are interfaces that vLLM offers.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

HOOKS: dict[str, tuple[str, ...]] = {
    # Flags, keywords and configuration; buffers for one request more than the scheduler may fill.
    "frontend/plugin.py": (
        "vllm.engine.arg_utils:EngineArgs.__init__",
        "vllm.engine.arg_utils:AsyncEngineArgs.__init__",
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
    ),
    # Where a chat is evicted.
    "frontend/noting.py": (
        "vllm.renderers.base:BaseRenderer.render_chat",
        "vllm.renderers.base:BaseRenderer.render_chat_async",
    ),
    # Where a chat of gpt-oss is evicted.
    "frontend/harmony.py": (
        "vllm.renderers.online_renderer:OnlineRenderer._make_request_with_harmony",
        "vllm.renderers.online_renderer:OnlineRenderer.render_responses_harmony_messages",
    ),
    # What was found in a chat goes along with its tokens; the options, in a server without an engine.
    "frontend/rendering.py": (
        "vllm.entrypoints.scale_out.render.serving:ServingRender.render_chat_request",
        "vllm.entrypoints.scale_out.render.serving:ServingRender.render_responses_request",
        "vllm.entrypoints.launchers.render.entry:init_render_app_state",
    ),
    # Requests are checked, before a stream begins; other schedulers and beam search are refused; chats are rendered
    # once more in vLLM's threads for that.
    "frontend/requests.py": (
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "vllm.v1.engine.async_llm:AsyncLLM.add_request",
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
    ),
    # Clients that still wait get an error.
    "frontend/stopping.py": ("vllm.v1.engine.async_llm:AsyncLLM.shutdown",),
    # Our backend for evicted layers.
    "devices.py": ("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",),
    # Which row is which request, which steps CUDA graphs must not serve, and windows in blocks that were states.
    "worker/model_runners.py": (
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids",
    ),
    # Draft models have the backend that vLLM chooses.
    "worker/draft_model.py": (
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
    ),
    # Two faults with drafts on a CPU.
    "worker/sampling.py": (
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    ),
}
"""By the file of this folder that wraps them: functions of vLLM, each as ``module:name``."""

_TARGETS = frozenset(target for targets in HOOKS.values() for target in targets)


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
    theirs = getattr(owner, name) if of is not None else inspect.getattr_static(owner, name)
    kind = type(theirs) if isinstance(theirs, (classmethod, staticmethod)) else None
    theirs = theirs if kind is None else theirs.__func__
    ours = functools.update_wrapper(make(theirs), theirs)
    setattr(owner, name, ours if kind is None else kind(ours))


def before(target: str, check: Callable[..., None]) -> None:
    """Call ``check`` with a method's arguments when it is called, even if it is an asynchronous generator."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return method(*args, **kwargs)

        return checked

    wrap(target, make)
