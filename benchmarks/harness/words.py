"""Random texts."""

import random


def random_words(choose: random.Random, length: int) -> str:
    """A text of so many words, each of which is at least one token of any tokenizer."""
    return " ".join(f"w{choose.randrange(8, 500)}" for _ in range(length))
