"""Checks of single requests in the front-end, where a refusal becomes an HTTP 400."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvevict.engine import hooks, metrics
from vllm_kvevict.engine.config import KVEvictionError, options_of, require_options
from vllm_kvevict.engine.frontend import media, noting
from vllm_kvevict.engine.frontend.checks import check_policy, check_scheduler
from vllm_kvevict.engine.frontend.command_line import errors_in_one_line
from vllm_kvevict.engine.frontend.repeats import repeat_prompts
from vllm_kvevict.engine.memory import check_fits
from vllm_kvevict.engine.request_options import (
    POLICY,
    ChatFacts,
    Rendered,
    RequestOptions,
    facts_of,
    not_written,
)
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import repeats_prompt, schedule_for, schedule_of

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
    hooks.wrap(f"{engine}.add_request", _finding_repeats_in_threads)
    noting.install()


Checked = tuple[RequestOptions, Plan]
"""What was read of a request."""


def _checking(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    def checked(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request = process_inputs(self, request_id, prompt, params, *args, **kwargs)
        # The request's own copy of what the caller may use for several prompts.
        own = request.sampling_params
        if options_of(self.vllm_config):
            if request.resumable:
                raise VLLMValidationError(SESSION, parameter="resumable")
            if own is not None:
                found = _last_checked(prompt, params)
                if found is None:
                    tokens = request.prompt_token_ids, request.prompt_embeds
                    found = _check_request(self, prompt, own, *tokens, bool(request.mm_features))
                _count_chat(*found, facts_of(prompt))
                own.extra_args = _complete(*found, self.renderer, prompt).to_extra_args(own.extra_args)
        return request

    return checked


@functools.cache
def install_in_server() -> None:
    """The same for the one endpoint that calls ``AsyncLLM.generate`` after its stream began; only servers have it."""
    responses = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
    hooks.before(f"{responses}._generate_with_builtin_tools", _check_responses)


def _finding_repeats_in_threads(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Let a server render chats once more in vLLM's threads for that; it checks requests in its event loop."""

    async def found_before(
        self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = _last_checked(prompt, params) if options_of(self.vllm_config) else None
        if found is not None:
            options, plan = found
            if repeats_prompt(plan):
                loop, threads = asyncio.get_running_loop(), self.renderer._executor
                options = await loop.run_in_executor(threads, _complete, *found, self.renderer, prompt)
            facts_of(prompt).last_read = params, (options, plan)
        return await add_request(self, request_id, prompt, params, *args, **kwargs)

    return found_before


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
            found = _check_request(self, prompt, sampling_params, token_ids, embeds, with_media)
            facts_of(prompt).last_read = sampling_params, found


def _check_responses(self: Any, *args: Any, engine_input: Any, sampling_params: Any, **kwargs: Any) -> None:
    _check_generate(self.engine_client, engine_input, sampling_params)


def passed_on_fields(vllm_config: Any, renderer: Any, prompt: Any, params: Any) -> dict[str, Any]:
    """The fields with which an engine makes of a chat's tokens what it would make of the chat.

    Whether the chat fits that engine is checked there.

    Args:
        prompt: the chat as it was rendered here.
        params: the request's SamplingParams, left as they are.

    Raises:
        VLLMValidationError: one sentence naming the field.
    """
    with _refusing(params):
        found = _read(vllm_config, prompt, params, len(prompt["prompt_token_ids"]))
    return _complete(*found, renderer, prompt).to_fields(params.extra_args)


def _read(vllm_config: Any, prompt: Any, params: Any, length: int) -> Checked:
    """What a request asks for. Raises KVEvictionError."""
    server = require_options(vllm_config)
    room = vllm_config.model_config.max_model_len - length
    most_output = room if params.max_tokens is None else min(params.max_tokens, room)
    options = RequestOptions.read(server, params.extra_args, length, facts_of(prompt), most_output)
    return options, options.plan(server, length)


def _complete(options: RequestOptions, plan: Plan, renderer: Any, prompt: Any) -> RequestOptions:
    """The same with what asks the model to repeat the prompt, if it will; a chat is rendered once more for that."""
    if options.rendered.repeat is not None or not repeats_prompt(plan):
        return options
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    with_question = ids is not None and plan.parts[-1].repeated_at == len(ids)
    return options.asking(repeat_prompts(renderer, prompt, with_question))


def _last_checked(prompt: Any, params: Any) -> Checked | None:
    """What was read when the same request was checked before; it is used once, since both may change."""
    facts = facts_of(prompt)
    last, facts.last_read = facts.last_read, None
    return last[1] if last is not None and last[0] is params else None


def _count_chat(options: RequestOptions, plan: Plan, facts: ChatFacts) -> None:
    """Count a chat that only the server's scope keeps whole, or whose turns change later."""
    if options.by_scope and options.rendered.lasting is not None:
        metrics.count_changing()
    if options.by_scope and facts.ends is not None and plan.keeps_all:
        metrics.count_kept_whole("changes" if facts.changes else "short")


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
            raise KVEvictionError(f"{POLICY} {plan.config.policy} {conflict}", "prompt")


def _check_request(
    engine: Any, prompt: Any, params: SamplingParams, token_ids: Any, embeds: Any, with_media: bool
) -> Checked:
    """What scheduler and workers will follow; what they could not follow, or not hold, is refused.

    Args:
        engine: has ``vllm_config`` and ``renderer``.
    """
    config, length = engine.vllm_config, length_from_prompt_token_ids_or_embeds(token_ids, embeds)
    try:
        with _refusing(params):
            options, plan = _read(config, prompt, params, length)
            _check_vocabulary(options.rendered, config.model_config.get_vocab_size())
            check_policy(config, plan.config, POLICY)
            _check_contents(plan.config, embeds is not None, with_media)
            check_length(plan, config.model_config.max_model_len)
            # vLLM may cut a prompt with media into several steps, as the memory of its encoders allows.
            in_one_step = not with_media
            check_fits(config, require_options(config), plan, length, params.min_tokens, in_one_step)
    except VLLMValidationError:
        media.invalidate(engine.renderer, prompt)
        raise
    return options, plan


def _check_vocabulary(rendered: Rendered, size: int) -> None:
    """Refuse to repeat token ids that the model does not have."""
    lists = rendered.repeat.to_lists() if rendered.repeat else []
    if not all(0 <= token < size for tokens in lists for token in tokens):
        raise not_written(f"repeat must have token ids below {size}")


def _check_contents(config: EvictionConfig, with_embeds: bool, with_media: bool) -> None:
    """Refuse other contents than text where these are read once more.

    A chat that mixes text with embeddings or images has token ids too, but only placeholders where these stand.
    """
    if schedule_for(config.policy).reads_token_ids and (with_embeds or with_media):
        found = "embeddings" if with_embeds else "images, audio or video"
        words = f"needs a text-only prompt, without {found}: choose another policy"
        raise KVEvictionError(f"{POLICY} {config.policy} {words}", "prompt")


@contextlib.contextmanager
def _refusing(params: SamplingParams) -> Iterator[None]:
    """Let servers answer with HTTP 400, and name the field."""
    try:
        yield
    except KVEvictionError as error:
        given = {"min_tokens": params.min_tokens, **(params.extra_args or {})}
        value = given.get(error.field_name)
        raise VLLMValidationError(str(error), parameter=error.field_name, value=value) from None
