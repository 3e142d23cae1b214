"""What of an answer that is evicted while it is written must hold, whatever the engine does beside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine.support.masked import check_logits, expected_logits
from tests.engine.support.running import Answer, Ask
from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide

Kept = dict[int, list[list[int]]]
"""By layer, for each KV head the positions that stay."""


@dataclass(frozen=True)
class Rules:
    """How a server evicts answers: as of ``--kv-decode-budget`` and ``--kv-eviction-config.decode_*``."""

    budget: int
    interval: int
    window: int

    def options(self, policy: str | None = None, /, **others: Any) -> dict[str, Any]:
        """Of such a server, which checks itself."""
        options = {
            "decode_budget": self.budget,
            "decode_interval": self.interval,
            "decode_window": self.window,
            "check": True,
        }
        return options | ({} if policy is None else {"decode_policy": policy}) | others

    def budget_of(self, ask: Ask) -> int:
        """Entries of an answer that each KV head keeps on average."""
        return self.budget if ask.decode_budget is None else ask.decode_budget

    def positions(self, ask: Ask) -> list[int]:
        """After how many tokens an answer is evicted; its last token is not stored."""
        if not self.budget_of(ask):
            return []
        first = ask.length + self.budget_of(ask) + self.interval
        return list(range(first, ask.length + ask.max_tokens, self.interval))

    def split(self, ask: Ask, answer: Answer) -> tuple[list[Kept], list[tuple[int, Kept]]]:
        """What its prompt's evictions kept, and when and what those of its answer did, of a request that ran once."""
        at = self.positions(ask)
        prompts = answer.kept[: len(answer.kept) - len(at)]
        return prompts, list(zip(at, answer.kept[len(prompts) :], strict=True))

    def all_positions(self, ask: Ask, answer: Answer, of_prompt: Sequence[int] = ()) -> list[int]:
        """After how many tokens a request that ran once was evicted each time.

        Args:
            of_prompt: its prompt, if more than once.
        """
        prompts, _ = self.split(ask, answer)
        at = list(of_prompt or [ask.evicted_to])
        assert len(prompts) == len(at) or not (prompts or of_prompt), (
            "as often as it should be, or kept whole"
        )
        return [*at[: len(prompts)], *self.positions(ask)]

    def check(
        self,
        model: Path,
        asks: Sequence[Ask],
        answers: Sequence[Answer],
        of_prompts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """As much was kept as should be, and the logits are those of the plain model that sees that.

        Args:
            of_prompts: by index of a request, after how many tokens its prompt was evicted, if more than once.
        """
        for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            self.check_totals(ask, answer)
            at = self.all_positions(ask, answer, (of_prompts or {}).get(index, ()))
            check_logits(model, ask, answer, at)

    def check_totals(self, ask: Ask, answer: Answer) -> None:
        """All of the prompt's entries stay, and exactly the budget of the answer's."""
        prompts, later = self.split(ask, answer)
        for at, kept in later:
            rows = [row for layer in kept.values() for row in layer]
            of_answer = sum(sum(position >= ask.length for position in row) for row in rows)
            assert of_answer == len(rows) * self.budget_of(ask)
            for layer, heads in kept.items():
                for head, row in enumerate(heads):
                    of_prompt = set(prompts[-1][layer][head] if prompts else range(ask.length))
                    of_prompt.update(range(ask.evicted_to, ask.length))
                    assert [x for x in row if x < ask.length] == sorted(
                        x for x in of_prompt if x < ask.length
                    )
                    assert row[-self.window :] == list(range(at - self.window, at))

    def check_choice(self, model: Path, config: EvictionConfig, ask: Ask, answer: Answer) -> None:
        """What was kept is what the policy chooses from the plain model's queries and keys."""
        seen: dict[int, tuple] = {}
        at = self.all_positions(ask, answer)
        expected_logits(model, ask, answer, at, watch=lambda layer, *of: seen.update({layer: of}))
        _, later = self.split(ask, answer)
        before = {layer: [list(range(ask.length, later[0][0]))] * len(x) for layer, x in later[0][1].items()}
        same = total = 0
        for at, kept in later:
            for layer, (query, key, scale, _) in seen.items():
                rows = [[x for x in row if x >= ask.length] for row in before[layer]]
                widest = max(map(len, rows))
                keys = torch.zeros(len(rows), widest, key.shape[2])
                for head, row in enumerate(rows):
                    keys[head, widest - len(row) :] = key[head, row]
                lengths = torch.tensor([len(row) for row in rows]) if config.heads_compete else None
                inputs = LayerInputs(query[:, at - self.window : at], keys, scale=scale, lengths=lengths)
                (chosen,) = decide(config, [inputs])
                for head, row in enumerate(rows):
                    expected = {row[entry] for entry in chosen[head].tolist()}
                    found = {x for x in kept[layer][head] if x >= ask.length}
                    same, total = same + len(expected & found), total + len(expected)
            before = {
                layer: [row + list(range(at, at + self.interval)) for row in x] for layer, x in kept.items()
            }
        # Scores of two implementations of a model differ in their last bits, and some are nearly equal.
        assert same >= 0.995 * total
