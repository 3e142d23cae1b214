"""The user's own prompts: a file of JSON lines, each a text, a chat, or a document and a question about it."""

from typing import Any

from vllm_kvevict.chats import parse_chat, read_entries
from vllm_kvevict.quality.cases import Case

TASK = "prompts"
SHAPES = '{"prompt": TEXT}, {"messages": CHAT} or {"document": TEXT, "question": TEXT}'


def read_prompts(name: str) -> list[Case]:
    """The prompts of a file; - is standard input.

    What comes before the last user message of a chat, or is the document, can be evicted without the question in view.

    Raises:
        ValueError: a line is none of the three; one sentence that names it.
    """
    entries = read_entries(name, "--prompts")
    return [_case(entry, place, index) for index, (place, entry) in enumerate(entries)]


def _case(entry: Any, place: str, index: int) -> Case:
    if isinstance(entry, list) or (isinstance(entry, dict) and "messages" in entry):
        chat = parse_chat(entry, place)
        if chat.messages[-1]["role"] == "assistant" and not chat.settings.get("continue_final_message"):
            raise ValueError(
                f"{place}, message {len(chat.messages)}: the last message is the assistant's, whose turn it is next: "
                "leave it out"
            )
        return _made(index, context="", question=chat.asked, chat=chat)
    match entry:
        case {"prompt": str(text)} if text:
            return _made(index, context="", question=text, form="completion")
        case {"document": str(document), "question": str(question)} if document and question:
            return _made(index, context=f"{document}\n\n", question=question, form="message")
    found = f"its fields are {', '.join(entry)}" if isinstance(entry, dict) and entry else "it has no fields"
    raise ValueError(f"{place} is not {SHAPES}, with texts that are not empty: {found}")


def _made(index: int, **parts: Any) -> Case:
    nothing: dict[str, Any] = {"length": None, "depth": None, "expected": (), "max_tokens": 0}
    return Case(task=TASK, index=index, score=lambda reply: 0.0, **nothing, **parts)
