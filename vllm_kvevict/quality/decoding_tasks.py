"""Answers that are scored while they are evicted: long ones that the model writes, and made ones that recall facts."""

import random
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.quality.cases import Case
from vllm_kvevict.quality.texts import sentences

WRITING, RECALL = "writing", "recall"
TASKS = (WRITING, RECALL)
FORMS = (
    "Write a long story about {}.",
    "Write a long and detailed essay about {}.",
    "Explain everything that a beginner should know about {}, step by step and in full sentences.",
    "Write a long letter to a friend about {}.",
)
SUBJECTS = (Path(__file__).parent / "subjects.txt").read_text().splitlines()
NAMES = (
    *("Anna", "Peter", "Maria", "Robert", "Sarah", "David"),
    *("Laura", "Thomas", "Emma", "Daniel", "Alice", "Martin"),
)
FACTS = 4
ASKED = (
    "Give {count} people an access code each. Then write down what you know about a programming language. At the end "
    "repeat the access codes."
)


def answers(tasks: Sequence[str], samples: int, seed: int, tokens: int) -> list[Case]:
    """Samples of the tasks, the first of each first.

    Args:
        tokens: of an answer.
    """
    subjects = writing(seed, samples)

    def case(task: str, index: int) -> Case:
        question, answer = (subjects[index], ()) if task == WRITING else recall(seed, index, 3 * tokens // 8)
        named, not_scored = (task, tokens, None, index), ((), 0, lambda reply: 0.0)
        return Case(*named, "", question, *not_scored, form="message", answer=answer)

    return [case(task, index) for index in range(samples) for task in tasks]


def writing(seed: int, samples: int) -> list[str]:
    """What the model is asked to write about; the same seed gives the same, however many are asked for."""
    asked = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    random.Random(f"{seed}/{WRITING}").shuffle(asked)
    return [asked[index % len(asked)] for index in range(samples)]


def recall(seed: int, index: int, words: int) -> tuple[str, tuple[str, ...]]:
    """A prompt, and an answer that begins with facts and ends with them; see Case.

    Args:
        words: between the facts and their repetition, at least; no tokenizer has fewer tokens.
    """
    rng = random.Random(f"{seed}/{RECALL}/{index}")
    names = rng.sample(NAMES, FACTS)
    codes = {name: f"{rng.randrange(1000, 10000)}" for name in names}
    said = " ".join(f'The access code of {name} is "{code}".' for name, code in codes.items())
    between: list[str] = []
    start = rng.randrange(len(sentences()))
    while sum(len(sentence.split()) for sentence in between) < words:
        between.append(sentences()[(start + len(between)) % len(sentences())])
    again = rng.sample(names, FACTS)
    pieces = [f"{said}\n\n{' '.join(between)}\n\nAgain, the access codes from the beginning."]
    for name in again:
        pieces[-1] += f' The access code of {name} is "'
        pieces += [codes[name], '".']
    return ASKED.format(count=FACTS), tuple(pieces)
