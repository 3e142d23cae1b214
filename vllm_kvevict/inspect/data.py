"""What is shown of a prompt and of what policies keep of it; needs no vLLM."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        ids: of the tokens.
        texts: the prompt's text, cut into tokens. A token has no text if it continues the character before it.
        special: tokens that the tokenizer added, such as a first one; their texts are names and no part of the prompt.
    """

    ids: list[int]
    texts: list[str]
    special: list[int]

    @property
    def text(self) -> str:
        """The text that the tokens were made of."""
        added = set(self.special)
        return "".join(text for index, text in enumerate(self.texts) if index not in added)


@dataclass(frozen=True)
class Kept:
    """What a policy keeps of the prompt.

    Attributes:
        policy, budget: as they were asked for.
        mask: bool [layers, KV heads, tokens], true where a head keeps a token.
    """

    policy: str
    budget: float
    mask: np.ndarray

    @property
    def entries(self) -> np.ndarray:
        """int64 [layers, KV heads]: tokens that each head keeps."""
        return self.mask.sum(-1, dtype=np.int64)


@dataclass(frozen=True)
class Inspection:
    """A prompt and what each of several policies keeps of it.

    Attributes:
        model: its name.
        evicted_tokens: the policies choose among so many first tokens; what comes behind is kept whole.
        turns: numbers of tokens after which turns end, where the policies choose among those of one turn at a time.
        answer: what was written before the prompt was evicted, with a lookahead.
        branch: another conversation that begins like this one.
        layers: numbers, within the model, of the layers that are evicted.
        page_size: tokens of one KV head in a page.
        page_bytes: memory of a page.
        kept: of each policy.
    """

    model: str
    prompt: Prompt
    evicted_tokens: int
    layers: list[int]
    page_size: int
    page_bytes: int
    kept: list[Kept]
    turns: tuple[int, ...] = ()
    answer: str = ""
    branch: "Inspection | None" = None

    @property
    def shared_turns(self) -> int:
        """How many turns the branch begins with, too: whoever has read one has them compressed for both."""
        if self.branch is None:
            return 0
        ids, others = self.prompt.ids, self.branch.prompt.ids
        pairs = zip(self.turns, self.branch.turns, strict=False)
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1] and ids[: pair[0]] == others[: pair[0]], pairs
        )
        return sum(1 for _ in same)

    @property
    def tokens_per_turn(self) -> list[int]:
        """Of each turn, and of what comes behind the last one, if there is something."""
        ends = [0, *self.turns, len(self.prompt.ids)]
        return [end - begins for begins, end in itertools.pairwise(ends) if end > begins]

    def entries_per_turn(self, kept: Kept) -> list[int]:
        """Of the same, what a policy keeps in all layers and heads."""
        of_tokens = kept.mask.sum((0, 1), dtype=np.int64)
        ends = itertools.accumulate(self.tokens_per_turn)
        return [
            int(of_tokens[end - length : end].sum())
            for length, end in zip(self.tokens_per_turn, ends, strict=True)
        ]

    def shares_per_turn(self, kept: Kept) -> list[float]:
        """The same, of all entries."""
        rows = kept.mask.shape[0] * kept.mask.shape[1]
        pairs = zip(self.entries_per_turn(kept), self.tokens_per_turn, strict=True)
        return [entries / (rows * length) for entries, length in pairs]

    def memory(self, entries: np.ndarray) -> int:
        """Bytes of the pages that hold so many tokens of each head."""
        return int((-(-entries // self.page_size)).sum()) * self.page_bytes

    def summary(self) -> dict[str, Any]:
        """All but the kept positions and the branch, as plain JSON."""
        heads = self.kept[0].mask.shape[1]
        return {
            "model": self.model,
            "prompt_tokens": len(self.prompt.ids),
            "evicted_tokens": self.evicted_tokens,
            "turns": list(self.turns),
            "shared_turns": self.shared_turns,
            "answer": self.answer,
            "layers": self.layers,
            "kv_heads": heads,
            "page_size": self.page_size,
            "page_bytes": self.page_bytes,
            "token_ids": self.prompt.ids,
            "token_texts": self.prompt.texts,
            "special_tokens": self.prompt.special,
            "policies": [self._totals(kept) for kept in self.kept],
        }

    def _totals(self, kept: Kept) -> dict[str, Any]:
        whole = np.full(kept.mask.shape[:2], kept.mask.shape[2])
        return {
            "policy": kept.policy,
            "budget": kept.budget,
            "entries": {"kept": int(kept.mask.sum()), "of": kept.mask.size},
            "bytes": {"before": self.memory(whole), "after": self.memory(kept.entries)},
            "entries_per_head": kept.entries.tolist(),
            "entries_per_turn": self.entries_per_turn(kept),
        }

    def to_json(self) -> dict[str, Any]:
        """The summary, for each policy the kept positions as ``kept[layer][head]``, and the same of the branch."""
        content = self.summary()
        for policy, kept in zip(content["policies"], self.kept, strict=True):
            policy["kept"] = [[np.flatnonzero(head).tolist() for head in layer] for layer in kept.mask]
        if self.branch is not None:
            content["branch"] = self.branch.to_json()
        return content
