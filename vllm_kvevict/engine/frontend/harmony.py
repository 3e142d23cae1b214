"""Where the question of a chat with a gpt-oss model begins: vLLM renders these by OpenAI's harmony, not a template."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.parser.harmony_utils import (
    Message,
    Role,
    get_user_message,
    render_for_completion,
)
from vllm.renderers.base import BaseRenderer
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_kvevict.engine import hooks
from vllm_kvevict.engine.frontend.chat import Chat
from vllm_kvevict.engine.frontend.noting import note_chat, note_ends


class HarmonyChat(Chat):
    """A chat whose messages are harmony's."""

    @property
    def question(self) -> int | None:
        users = [index for index, message in enumerate(self.messages) if message.author.role == Role.USER]
        return users[-1] if users else None

    def rendered(self, messages: Sequence[Any], settings: Mapping[str, Any] | None = None) -> Any:
        """The prompt's tokens; there is no template that could take settings."""
        return {"prompt_token_ids": render_for_completion(list(messages))}

    def up_to(self, question: str | list[Any]) -> list[Any]:
        assert isinstance(question, str)
        return [*self.messages[: self.question], get_user_message(question)]

    def going_on(self, reply: str, question: str) -> list[Any]:
        answer = Message.from_role_and_content(Role.ASSISTANT, reply).with_channel("final")
        return [*self.messages, answer, get_user_message(question)]


@functools.cache
def install() -> None:
    """Note in the chats of this server where they are evicted, if its scope is not the whole prompt."""
    renderer = "vllm.renderers.online_renderer:OnlineRenderer"
    hooks.wrap(f"{renderer}._make_request_with_harmony", _noting_request)
    hooks.wrap(f"{renderer}.render_responses_harmony_messages", _noting_messages)


def _noting_request(make_request: Callable[..., Any]) -> Callable[..., Any]:
    def noted_request(self: OnlineRenderer, *args: Any, **kwargs: Any) -> Any:
        messages, prompts = make_request(self, *args, **kwargs)
        for prompt in prompts:
            _note(self.renderer, messages, prompt, None)
        return messages, prompts

    return noted_request


def _noting_messages(render_messages: Callable[..., Any]) -> Callable[..., Any]:
    def noted_messages(
        self: OnlineRenderer, messages: Any, *args: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        prompt = render_messages(self, messages, *args, tok_params=tok_params, **kwargs)
        _note(self.renderer, messages, prompt, tok_params)
        return prompt

    return noted_messages


def _note(renderer: BaseRenderer, messages: Sequence[Any], prompt: Any, tok_params: Any) -> None:
    """Note what a prompt was rendered from; tokens that another server has sent come without messages."""
    chat = HarmonyChat(renderer, list(messages), None, tok_params)
    if messages and note_chat(chat, prompt):
        note_ends(prompt)
