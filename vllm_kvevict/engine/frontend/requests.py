"""Checks of single requests in the front-end, where a refusal becomes an HTTP 400."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvevict.engine import hooks, metrics
from vllm_kvevict.engine.config import (
    REPEAT_ROWS,
    TRANSFER,
    KVEvictionError,
    Options,
    check_names,
    options_of,
    require_options,
)
from vllm_kvevict.engine.frontend import chat, media, noting
from vllm_kvevict.engine.frontend.checks import check_policy, check_scheduler
from vllm_kvevict.engine.frontend.command_line import errors_in_one_line
from vllm_kvevict.engine.frontend.repeats import check_rows, repeat_prompts
from vllm_kvevict.engine.memory import check_fits
from vllm_kvevict.engine.turns import LASTING, TURNS, WHOLE
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import repeats_prompt, schedule_for, schedule_of
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

BEAM_SEARCH = (
    "beam search cannot be used with --kv-eviction: vLLM restarts its requests without their kv_* fields"
)
SESSION = "resumable sessions cannot be used with --kv-eviction: what to keep is chosen for one prompt only"


@functools.cache
def install() -> None:
    """Check every request of this process before it reaches an engine that evicts. Others pass unchanged."""
    processor, engine = "vllm.v1.engine.input_processor:InputProcessor", "vllm.v1.engine.async_llm:AsyncLLM"
    hooks.wrap(f"{processor}.process_inputs", _checking)
    # What vLLM makes first of all that it makes of its configuration.
    hooks.before(f"{processor}.__init__", _check_scheduler)
    search = "vllm.entrypoints.generate.beam_search"
    hooks.before(f"{search}.online:BeamSearchOnlineMixin.beam_search", _check_beam_search_online)
    hooks.before(f"{search}.offline:BeamSearchOfflineMixin.beam_search", _check_beam_search_offline)
    # A streamed answer has begun, with status 200, before its prompt reaches the input processor.
    hooks.before(f"{engine}.generate", _check_generate)
    hooks.wrap(f"{engine}.add_request", _noting_rows_in_threads)
    noting.install()


def _checking(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    def checked(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request = process_inputs(self, request_id, prompt, params, *args, **kwargs)
        if options_of(self.vllm_config):
            if request.resumable:
                raise VLLMValidationError(SESSION, parameter="resumable")
            # The request's own copy of what the caller may use for several prompts.
            own = request.sampling_params
            if own is not None:
                tokens = request.prompt_token_ids, request.prompt_embeds
                with_media = bool(request.mm_features)
                given = own.extra_args
                with _invalidating_media_if_refused(self.renderer, prompt):
                    own.extra_args = _checked_fields(self.vllm_config, prompt, own, *tokens, with_media)
                if own.extra_args is not given and isinstance(prompt, dict):
                    _count_chat(self.vllm_config, prompt, own.extra_args)
                find = _finder_of_rows(self.vllm_config, self.renderer, prompt, own, *tokens)
                if find is not None:
                    noted = prompt.get(REPEAT_ROWS) if isinstance(prompt, dict) else None
                    own.extra_args = _with_rows(own.extra_args, noted or find())
        return request

    return checked


@functools.cache
def install_in_server() -> None:
    """The same for the one endpoint that calls ``AsyncLLM.generate`` after its stream began; only servers have it."""
    responses = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
    hooks.before(f"{responses}._generate_with_builtin_tools", _check_responses)


def _noting_rows_in_threads(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Let a server render chats once more in vLLM's threads for that; it checks requests in its event loop."""

    async def noted(
        self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(prompt, dict) and "type" in prompt and options_of(self.vllm_config):
            tokens = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
            find = _finder_of_rows(self.vllm_config, self.renderer, prompt, params, *tokens)
            if find is not None:
                loop = asyncio.get_running_loop()
                prompt[REPEAT_ROWS] = await loop.run_in_executor(self.renderer._executor, find)
        return await add_request(self, request_id, prompt, params, *args, **kwargs)

    return noted


def _check_scheduler(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    if options_of(vllm_config):
        with errors_in_one_line():
            check_scheduler(vllm_config)


def _check_beam_search_online(self: Any, *args: Any, **kwargs: Any) -> None:
    if options_of(self.engine_client.vllm_config):
        raise VLLMValidationError(BEAM_SEARCH, parameter="use_beam_search", value=True)


def _check_beam_search_offline(self: Any, *args: Any, **kwargs: Any) -> None:
    if options_of(self.llm_engine.vllm_config):
        raise VLLMValidationError(BEAM_SEARCH)


def _check_generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> None:
    if not options_of(self.vllm_config):
        return
    if isinstance(prompt, AsyncGenerator):
        raise VLLMValidationError(SESSION)
    if isinstance(prompt, dict) and isinstance(sampling_params, SamplingParams):
        token_ids, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
        if token_ids is not None or embeds is not None:
            with_media = media.has_media(prompt)
            with _invalidating_media_if_refused(self.renderer, prompt):
                _checked_fields(self.vllm_config, prompt, sampling_params, token_ids, embeds, with_media)


@contextlib.contextmanager
def _invalidating_media_if_refused(renderer: Any, prompt: Any) -> Iterator[None]:
    try:
        yield
    except VLLMValidationError:
        media.invalidate(renderer, prompt)
        raise


def _check_responses(self: Any, *args: Any, engine_input: Any, sampling_params: Any, **kwargs: Any) -> None:
    _check_generate(self.engine_client, engine_input, sampling_params)


def passed_on_fields(vllm_config: Any, renderer: Any, prompt: Any, params: Any) -> dict[str, Any] | None:
    """The fields with which an engine makes of a chat's tokens what it would make of the chat.

    Whether the chat fits that engine is checked there.

    Args:
        prompt: the chat as it was rendered here.
        params: the request's SamplingParams, left as they are.

    Raises:
        VLLMValidationError: one sentence naming the field.
    """
    tokens = prompt["prompt_token_ids"], None
    with _refusing(params):
        fields = _fields_in_scope(
            require_options(vllm_config), len(prompt["prompt_token_ids"]), prompt, params
        )
    find = _finder_of_rows(vllm_config, renderer, prompt, params, *tokens)
    return fields if find is None else _with_rows(fields, find())


def _with_rows(fields: Mapping[str, Any] | None, rows: RepeatPrompts) -> dict[str, Any]:
    return {**(fields or {}), REPEAT_ROWS: rows.to_lists()}


def _finder_of_rows(
    vllm_config: Any, renderer: Any, prompt: Any, params: Any, token_ids: Any, embeds: Any
) -> Callable[[], RepeatPrompts] | None:
    """What finds how the model is asked to repeat what is evicted of this request.

    Returns:
        None if it is not asked, or the request is refused, or says so itself since it was rendered before.
    """
    if REPEAT_ROWS in (getattr(params, "extra_args", None) or ()):
        return None
    options = require_options(vllm_config)
    length = length_from_prompt_token_ids_or_embeds(token_ids, embeds)
    try:
        fields = _fields_in_scope(options, length, prompt, params)
        plan = options.plan(length, fields)
    except KVEvictionError:
        return None
    if not repeats_prompt(plan):
        return None
    return functools.partial(repeat_prompts, renderer, prompt, with_question=plan.evicted_at == length)


def _fields_in_scope(options: Options, length: int, prompt: Any, params: Any) -> dict[str, Any] | None:
    """A request's fields and what the server's scope adds to them; a refusal says why it cannot."""
    noted = prompt if isinstance(prompt, dict) else {}
    missing = noted.get(chat.NO_PREFIX)
    given, most_output = getattr(params, "extra_args", None), getattr(params, "max_tokens", None)
    fields = options.fields_in_scope(length, _found_in(noted), given, missing, most_output)
    if fields is None or TURNS not in noted or fields.get(TURNS) is not noted[TURNS]:
        return fields
    names = (LASTING, WHOLE) if options.keep_first else (LASTING,)
    return {**fields, **{name: noted[name] for name in names if name in noted}}


def _found_in(prompt: Mapping[str, Any]) -> int | list[int] | None:
    """Where a prompt is evicted in the scope of its server; None if that was not looked for or cannot be told."""
    return prompt.get(chat.PREFIX_LEN, prompt.get(TURNS))


def _count_chat(vllm_config: Any, prompt: Any, fields: dict[str, Any] | None) -> None:
    """Count a chat that would be evicted in scope ``prompt`` and is not in the server's, or whose turns change later.

    Args:
        fields: of the request, with what the scope added to them.
    """
    if _found_in(prompt) is None:
        return
    if LASTING in (fields or ()):
        metrics.count_changing()
    if require_options(vllm_config).plan(len(prompt["prompt_token_ids"]), fields).keeps_all:
        metrics.count_kept_whole("changes" if prompt.get(chat.CHANGES) else "short")


def check_length(plan: Plan, longest: int) -> None:
    """Refuse what is too long to be repeated behind itself.

    Args:
        plan: of the request.
        longest: most tokens of a request.

    Raises:
        KVEvictionError: one sentence.
    """
    for part in plan.parts:
        conflict = schedule_of(part).conflict_with_length(part, longest)
        if conflict is not None:
            raise KVEvictionError(f"kv_eviction {plan.config.policy} {conflict}", "prompt")


def _check_others(fields: Mapping[str, Any]) -> None:
    """Refuse a value of vLLM's own field by which vLLM would fail while it answers.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    given = fields.get(TRANSFER)
    if given is not None and not isinstance(given, dict):
        raise KVEvictionError(f"{TRANSFER} must be an object, got {given!r}", TRANSFER)


def _checked_fields(
    vllm_config: Any, prompt: Any, params: SamplingParams, token_ids: Any, embeds: Any, with_media: bool
) -> dict[str, Any] | None:
    """The fields that scheduler and workers will follow; what they could not follow, or not hold, is refused."""
    options = require_options(vllm_config)
    length = length_from_prompt_token_ids_or_embeds(token_ids, embeds)
    with _refusing(params):
        check_names(params.extra_args or ())
        _check_others(params.extra_args or {})
        check_rows(params.extra_args or {}, vllm_config.model_config.get_vocab_size())
        config, _ = options.request_config(params.extra_args)
        check_policy(vllm_config, config, "kv_eviction")
        # A chat that mixes text with embeddings or images has token ids too, but only placeholders where these stand.
        if schedule_for(config.policy).reads_token_ids and (embeds is not None or with_media):
            found = "embeddings" if embeds is not None else "images, audio or video"
            raise KVEvictionError(
                f"kv_eviction {config.policy} needs a text-only prompt, without {found}: choose another policy",
                "prompt",
            )
        fields = _fields_in_scope(options, length, prompt, params)
        plan = options.plan(length, fields)
        check_length(plan, vllm_config.model_config.max_model_len)
        # vLLM may cut a prompt with media into several steps, as the memory of its encoders allows.
        check_fits(vllm_config, options, plan, length, params.min_tokens, in_one_step=not with_media)
        return fields


@contextlib.contextmanager
def _refusing(params: SamplingParams) -> Iterator[None]:
    """Let servers answer with HTTP 400, and name the field."""
    try:
        yield
    except KVEvictionError as error:
        given = {"min_tokens": params.min_tokens, **(params.extra_args or {})}
        value = given.get(error.field_name)
        raise VLLMValidationError(str(error), parameter=error.field_name, value=value) from None
