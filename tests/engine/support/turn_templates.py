"""Chat templates that treat earlier turns in the ways of real ones, and conversations that show it."""

from typing import Any

from tests.engine.support.chats import CHATML, TURNS, template

MOVES_SYSTEM = template("moves_system")
DROPS_THOUGHTS = template("drops_thoughts")
DROPS_EMPTY = template("drops_empty")
NO_RESULTS = CHATML.replace(TURNS, "{% for m in messages if m.role != 'tool' %}")
SORTS_RESULTS = template("sorts_results")

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
