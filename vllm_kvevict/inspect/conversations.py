"""What ``inspect`` reads: a text, or a chat as a server makes a prompt of it, and where its turns end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from vllm_kvevict.chats import ChatRequest
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.frontend import media
from vllm_kvevict.engine.frontend.chat import REFUSALS
from vllm_kvevict.engine.frontend.requests import passed_on_fields
from vllm_kvevict.engine.request_options import TURNS, facts_of
from vllm_kvevict.inspect.data import Prompt
from vllm_kvevict.inspect.text import tokenize


@dataclass(frozen=True)
class Reading:
    """A prompt.

    Attributes:
        turns: numbers of tokens after which it may be evicted, where that is done turn by turn.
        rendered: of a chat, the prompt as vLLM has rendered it.
    """

    prompt: Prompt
    turns: tuple[int, ...] = ()
    rendered: Any = None

    def fields(self, llm: LLM, fields: dict[str, Any]) -> dict[str, Any]:
        """What a request says to have it evicted as a server would, beside its policy and budget.

        Raises:
            VLLMValidationError: one sentence naming the field.
        """
        if self.rendered is None:
            return fields | {TURNS: list(self.turns)} if self.turns else fields
        params = SamplingParams(extra_args=fields)
        return passed_on_fields(llm.llm_engine.vllm_config, llm.renderer, self.rendered, params)


def reading_of_text(vllm_config: Any, renderer: Any, text: str, turns: Sequence[int]) -> Reading:
    """Raises ValueError, as below."""
    prompt = tokenize(renderer.get_tokenizer(), text)
    if not prompt.ids:
        raise ValueError("the prompt has no tokens")
    if turns:
        _check_last(vllm_config, turns[-1])
    return Reading(prompt, tuple(turns))


def reading_of_chat(
    vllm_config: Any, renderer: Any, chat: ChatRequest, template: Mapping[str, Any]
) -> Reading:
    """A chat, whose turns end where a server finds that they do in scope ``turns``.

    Args:
        renderer: of an engine with this configuration.
        template: arguments of `vllm serve` for chat templates, with the text of the template itself.

    Raises:
        ValueError: the chat has no turn that would be evicted, or cannot be shown; one sentence.
    """
    try:
        rendered = _rendered(renderer, chat, template)
    except REFUSALS as error:
        raise ValueError(f"the chat cannot be rendered: {error}") from error
    if "prompt" not in rendered or media.has_media(rendered):
        raise ValueError(
            "only chats that are rendered as text can be shown: images and some models' own formats are not"
        )
    prompt = tokenize(renderer.get_tokenizer(), rendered["prompt"], with_special=False)
    if prompt.ids != list(rendered["prompt_token_ids"]):
        raise ValueError("the chat's tokens are not those of its text, so they cannot be shown")
    facts = facts_of(rendered)
    if facts.missing is not None:
        raise ValueError(facts.missing)
    if not facts.ends:
        raise ValueError(
            "no turn of the chat ends: instructions, or an answer, have to come before its last message"
        )
    options = require_options(vllm_config)
    whole = facts.whole if options.keep_first else 0
    if whole < options.page_size:
        _check_last(vllm_config, facts.ends[-1])
    return Reading(prompt, tuple(facts.ends), rendered)


def _rendered(renderer: Any, chat: ChatRequest, template: Mapping[str, Any]) -> Any:
    """As a server would; the frontend notes in it what it was rendered from."""
    request = ChatCompletionRequest(**chat.body())
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    defaults = {**template.get("default_chat_template_kwargs", {}), "tools": tools, "tokenize": False}
    form = template.get("chat_template_content_format", "auto")
    params = request.build_chat_params(template.get("chat_template"), form).with_defaults(defaults)
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    _, (rendered,) = renderer.render_chat([list(chat.messages)], params, tok_params)
    return rendered


def _check_last(vllm_config: Any, end: int) -> None:
    least = require_options(vllm_config).least_turn
    if end < least:
        raise ValueError(
            f"the turns have {end} tokens in all, and turns of fewer than {least} are evicted with the next one: lower "
            "--kv-eviction-config.min_turn"
        )
