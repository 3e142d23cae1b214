"""Chats that one server renders and another one answers, or the same one later.

vLLM's ``render`` routes answer with the request that a client sends to ``/inference/v1/generate``. That has the tokens
of a chat, but neither its messages nor its template, so what was found with these goes along in the request's fields:
where the question begins, and what the model is asked when it repeats what comes before.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from vllm_kvevict.engine import hooks
from vllm_kvevict.engine.config import KEY
from vllm_kvevict.engine.frontend import noting
from vllm_kvevict.engine.frontend.requests import passed_on_fields


@functools.cache
def install() -> None:
    """Write into the chats that this server renders for ``/inference/v1/generate`` what it has found."""
    routes = "vllm.entrypoints.scale_out.render.serving:ServingRender"
    for name in ("render_chat_request", "render_responses_request"):
        hooks.wrap(f"{routes}.{name}", _passing_on)


def _passing_on(render: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of ServingRender that renders one chat write what was found into the fields of its result."""

    async def passing_on(self: ServingRender, *args: Any, **kwargs: Any) -> Any:
        prompts: list[Any] = []
        before = noting.WATCHED.set(prompts)
        try:
            result = await render(self, *args, **kwargs)
        finally:
            noting.WATCHED.reset(before)
        if prompts and isinstance(result, GenerateRequest):
            renderer, params = self.online_renderer.renderer, result.sampling_params
            # vLLM's own threads for templates, where a chat may have to be rendered once more.
            fields = await asyncio.get_running_loop().run_in_executor(
                renderer._executor, passed_on_fields, renderer.config, renderer, prompts[-1], params
            )
            params.extra_args = fields or None
        return result

    return passing_on


@functools.cache
def install_in_render_server() -> None:
    """The same for a server without an engine: vLLM builds its configuration without what its flags say of eviction."""
    from vllm_kvevict.engine.frontend import harmony

    def make(init_state: Callable[..., Any]) -> Callable[..., Any]:
        async def init_state_with_options(vllm_config: Any, state: Any, args: Any) -> None:
            vllm_config.additional_config = {
                **vllm_config.additional_config,
                KEY: args.additional_config[KEY],
            }
            await init_state(vllm_config, state, args)

        return init_state_with_options

    hooks.wrap("vllm.entrypoints.launchers.render.entry:init_render_app_state", make)
    noting.install()
    harmony.install()
    install()
