"""InfiniteBench's own checks of a reply, each 0 or 1 but for `leading_numbers`.

Answers come as the suite's files have them, or all as texts from the hub; numbers are compared as numbers.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any


def spaced(reply: str, signs: Sequence[str]) -> str:
    """The reply with single spaces instead of signs."""
    for sign in signs:
        reply = reply.replace(sign, " ")
    return re.sub(" {2,}", " ", reply)


def number(answer: Any) -> float:
    """An answer that is a number, or the text of one."""
    return float(answer)


def first_integer(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply's first run of digits is the answer."""
    found = re.search("[0-9]+", reply)
    return float(found is not None and found.group() == str(answers[0]))


def first_number(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply's first number, without its sign, is the answer."""
    found = re.search(r"\d+\.\d+|\d+", reply)
    return float(found is not None and float(found.group()) == number(answers[0]))


def last_integer(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply's last word is the answer."""
    found = spaced(reply, "\n.`'\":").split()
    return float(
        bool(found)
        and re.fullmatch(r"[+-]?\d+", found[-1]) is not None
        and int(found[-1]) == number(answers[0])
    )


def leading_numbers(reply: str, answers: Sequence[Any]) -> float:
    """How much of the answer, a list of numbers, the reply's runs of digits begin with."""
    nested = answers[0] if len(answers) == 1 else list(answers)
    if isinstance(nested, str):
        nested = ast.literal_eval(nested)
    expected = [number(part) for part in (nested if isinstance(nested, list | tuple) else [nested])]
    found = [int(digits) for digits in re.findall("[0-9]+", reply)]
    right = 0
    for one, other in zip(found, expected, strict=False):
        if one != other:
            break
        right += 1
    return right / len(expected)


def contains_word(reply: str, answers: Sequence[Any]) -> float:
    """Whether the answer is among the reply's words."""
    return float(answers[0] in spaced(reply, "\n:\"'.,?!{}").split())


def names_one(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply contains any of the names, in any case."""
    return float(any(answer.upper() in reply.upper() for answer in answers))


def last_letter(reply: str, letters: str) -> str:
    """The last letter that stands alone on the first line with one; empty if there is none."""
    found = re.search(rf"\b[{letters}]\b(?!.*\b[{letters}]\b)", reply)
    return found.group() if found else ""


def after_prefix(reply: str, prefixes: Sequence[str]) -> str | None:
    """What comes a space after the first of the prefixes that the reply has; None if it has none."""
    for prefix in prefixes:
        place = reply.find(prefix)
        if place >= 0:
            return reply[place + len(prefix) + 1 :]
    return None


def choice(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply chooses the right option. The answers are its text and its letter."""
    reply = reply.strip()
    if last_letter(reply, "A-D") in answers:
        return 1.0
    if reply[:1] in tuple("ABCD"):
        return float(reply[0] in answers)
    if reply in answers:
        return 1.0
    reply = spaced(reply, "\n\"'.,?!{}")
    after = after_prefix(reply, ("answer is:", "answer:", "answer is", "option is"))
    if after is not None:
        return float(after.startswith(tuple(answers)))
    # As in the suite, "AB" and the like end the search too.
    letter = next((word for word in reply.split() if word in "ABCD"), None)
    return float(letter in answers)


def faulty_function(reply: str, answers: Sequence[Any]) -> float:
    """Whether the reply names the right function. The answers are its name and its letter."""
    name, letter = answers[:2]
    reply = reply.strip()
    if last_letter(reply, "A-J") == letter:
        return 1.0
    reply = spaced(reply, ("\n", "`", "'", '"', "-", "*", "Option", "option"))
    if reply.startswith((letter, name)):
        return 1.0
    after = after_prefix(reply, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(after is not None and after.startswith((letter, name)))
