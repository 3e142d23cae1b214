"""Chat templates that treat earlier turns in the ways of real ones, and conversations that show it."""

from typing import Any

from tests.engine.support.chats import ANSWER, CHATML, TURNS

# The instructions stand in the last user message, as Mistral Nemo's do.
MOVES_SYSTEM = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}" + TURNS
    + "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + TURNS
    + "{% if m.role == 'user' %}[INST]{% if loop.index0 == ns.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)  # fmt: skip

# Thoughts before the last question are forgotten, and who answers for a tool does not ask, as in Qwen 3's.
QUESTIONS = (
    "{% set ns = namespace(last=-1) %}" + TURNS + "{% if m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
MESSAGE = "{{ m.content }}<|im_end|>\n{% endfor %}" + ANSWER + "<|im_start|>assistant\n{% endif %}"
DROPS_THOUGHTS = (
    QUESTIONS + TURNS + "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% continue %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning %}"
    "<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}" + MESSAGE
)  # fmt: skip
# The same, but the place for thoughts is there without any.
DROPS_EMPTY = (
    QUESTIONS + TURNS + "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}" + MESSAGE
)  # fmt: skip
NO_RESULTS = CHATML.replace(TURNS, "{% for m in messages if m.role != 'tool' %}")
# Results stand in the order of their calls' names.
SORTED = (
    "{% for r in messages[loop.index0:][:2] | selectattr('role', 'equalto', 'tool') | sort(attribute='tool_call_id') %}"
    "{{ r.content }};{% endfor %}"
)
SORTS_RESULTS = (
    TURNS + "{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif messages[loop.index0 - 1].role != 'tool' %}<|im_start|>tool\n" + SORTED + "<|im_end|>\n{% endif %}"
    "{% endfor %}" + ANSWER + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip

SYSTEM = {"role": "system", "content": "You know every harbour of Europe."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def result(text: str, call: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


PLAIN = [
    SYSTEM,
    user("Which port is the largest?"), answer("Rotterdam.", reasoning="I recall the tonnes."),
    user(" And the second? "), answer("Antwerp."),
    user("The third?"), answer("Hamburg."),
    user("Which lie at the sea?"), answer("None of them."),
]  # fmt: skip

LOOP = [
    SYSTEM,
    user("How much did each port move?"),
    *(
        message
        for year in range(2014, 2022)
        for message in (
            answer(f"I look at {year}.", reasoning=f"Not yet {year}."),
            result(f"{year}: 467 million tonnes", "2"),
            result(f"{year}: 290 million tonnes", "1"),
        )
    ),
    answer("They grow."),
    user("Did any shrink?"), answer("No."),
    user("Thank you."), answer("You are welcome."),
]  # fmt: skip
"""Eight rounds of tools, and further questions."""

ANSWERED_BY_USER = [
    SYSTEM,
    user("How much did Rotterdam move?"), answer("I look.", reasoning="It may be in the list."),
    user("<tool_response>467 million tonnes</tool_response>"), answer("467 million tonnes."),
    user("And Antwerp?"), answer("290."),
    user("Sum?"), answer("757."),
]  # fmt: skip
