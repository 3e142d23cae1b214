"""Checks of single requests in the front-end, where a refusal becomes an HTTP 400."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvevict.engine.config import KEY, KVEvictionError, Options

BEAM_SEARCH = (
    "beam search cannot be used while KV eviction is on: it restarts requests without their settings"
)
SESSION = "resumable sessions cannot be used while KV eviction is on: their KV outlives the prompt it was chosen for"


@functools.cache
def install() -> None:
    """Check every request of this process before it reaches an engine that evicts. Others pass unchanged."""
    check = InputProcessor.process_inputs

    @functools.wraps(check)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = check(self, *args, **kwargs)
        settings = _settings(self.vllm_config)
        if settings is not None and request.sampling_params is not None:
            if request.resumable:
                raise VLLMValidationError(SESSION, parameter="resumable")
            _check_fields(Options.parse(settings), request)
        return request

    InputProcessor.process_inputs = process_inputs  # type: ignore[method-assign]
    BeamSearchOnlineMixin.beam_search = _no_beam_search(  # type: ignore[method-assign]
        BeamSearchOnlineMixin.beam_search, "engine_client"
    )
    BeamSearchOfflineMixin.beam_search = _no_beam_search(  # type: ignore[method-assign]
        BeamSearchOfflineMixin.beam_search, "llm_engine"
    )


def _settings(vllm_config: Any) -> dict[str, Any] | None:
    config = vllm_config.additional_config
    return config.get(KEY) if isinstance(config, dict) else None


def _no_beam_search(search: Callable, engine: str) -> Callable:
    @functools.wraps(search)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _settings(getattr(self, engine).vllm_config) is not None:
            raise VLLMValidationError(BEAM_SEARCH, parameter="use_beam_search", value=True)
        return search(self, *args, **kwargs)

    return beam_search


def _check_fields(options: Options, request: Any) -> None:
    extra_args = request.sampling_params.extra_args
    prompt_len = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    try:
        options.plan(request.request_id, 1, prompt_len, extra_args)
    except KVEvictionError as error:
        value = (extra_args or {}).get(error.field_name)
        raise VLLMValidationError(str(error), parameter=error.field_name, value=value) from None
