"""What `vllm-kvevict quality fidelity` measured, once more without a server: with transformers, and by masking.

The answers of a folder are read by the plain model. Policies decide by what its attention computed, and the rows behind
the eviction are computed again without what was dropped. FOLDER/offline gets the measures, FOLDER/offline.md both.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_kvevict.machine import record
from vllm_kvevict.policies import EvictionConfig, Kept, LayerInputs, decide
from vllm_kvevict.policy_list import GRAMMAR, values
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.cases import TEXT, Case
from vllm_kvevict.quality.fidelity import (
    ANSWERS,
    FIDELITY,
    Answer,
    Choices,
    Fidelity,
    Tokens,
    check_prompt,
    score,
)
from vllm_kvevict.quality.fitting import TextQuestions, cases
from vllm_kvevict.quality.options import parse_budget, parse_policy
from vllm_kvevict.quality.results import FULL, Column, Store, read, read_settings, write_settings
from vllm_kvevict.quality.run import columns
from vllm_kvevict.quality.scores import NONE, Mean, Scores
from vllm_kvevict.quality.tables import table

OFFLINE, PROGRAM = "offline", "benchmarks.quality.offline"
LENGTHS = (96, 256)
"""Tokens of each answer, from its beginning, that a table counts."""
LONG = 64
"""Longer answers go on behind every lookahead."""
HEAD = ["policy", "budget", "KL", "offline", "KL behind the exact tokens", "offline", "agreement", "offline"]
HEAD += ["KL over offline's", "KL over that without lookahead", "behind the exact tokens"]
MEANING = (
    "Means over the tasks, with 95 % bootstrap intervals; quotients are paired by answer. The full cache answers "
    "greedily. Exact tokens of a lookahead count with what was measured for them, which is 0 up to rounding. The last "
    "column compares the same tokens without lookahead: what is left there is not the exact tokens' own gain."
)


class Plain:
    """The model as transformers defines it, in fp32; it stands in for an endpoint where prompts are made."""

    def __init__(self, folder: Path):
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        ALL_ATTENTION_FUNCTIONS.register(OFFLINE, self._attention)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=OFFLINE
        )
        self.layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        """Of the last whole text: queries, keys and values, [heads, tokens, d], and the logits' scale."""
        self._stays: list[torch.Tensor] | None = None

    async def tokenize(self, prompt: Mapping[str, Any]) -> list[int]:
        """Tokens of a chat."""
        said = {name: value for name, value in prompt.items() if name != "messages"}
        made = {"add_generation_prompt": True, "tokenize": False, **said}
        text = self._tokenizer.apply_chat_template(prompt["messages"], **made)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _attention(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> Any:
        group, rows, n, sees = query.shape[1] // key.shape[1], query.shape[2], key.shape[2], None
        if self._stays is None:
            self.layers.append((query[0], key[0], value[0], scaling))
        else:
            stays = self._stays[module.layer_idx]
            sees = torch.ones(len(stays), rows, n, dtype=torch.bool).tril(n - rows)
            sees[:, :, : stays.shape[1]] &= stays[:, None]
            sees = sees.repeat_interleave(group, 0)[None]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        out = scaled_dot_product_attention(query, key, value, sees, is_causal=sees is None, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def whole(self, tokens: Tokens, last: int = 0) -> torch.Tensor:
        """Logits at all places, or at so many last ones, [tokens, vocabulary]."""
        self.layers, self._stays = [], None
        return self._model(torch.tensor([tokens]), use_cache=False, logits_to_keep=last).logits[0]

    def behind(self, tokens: Tokens, at: int, kept: Kept) -> torch.Tensor:
        """The same from a place on, where only what is kept of what lies before it is seen."""
        self._stays = [torch.zeros(len(heads), at, dtype=torch.bool) for heads in kept]
        for stays, heads in zip(self._stays, kept, strict=True):
            for row, positions in zip(stays, heads, strict=True):
                row[positions] = True
        cache = DynamicCache()
        for layer, (_, key, value, _) in enumerate(self.layers):
            cache.update(key[None, :, :at], value[None, :, :at], layer)
        return self._model(torch.tensor([tokens[at:]]), past_key_values=cache).logits[0]


def decided(plain: Plain, column: Column, n: int) -> tuple[int, Kept]:
    """After how many tokens a prompt of n is evicted, and what stays of these."""
    ahead, budget = column.lookahead or 0, column.budget or 1.0
    size: dict[str, Any] = {"keep_ratio": budget} if budget <= 1 else {"budget": int(budget)}
    texts = [part.split("=") for part in column.parameters.split(",") if part]
    config = EvictionConfig(column.asked, **size, **values((name, text) for name, text in texts))
    p, config = n + ahead, config.for_lookahead(n, ahead) if ahead else config
    window = config.window_for(p)
    inputs = [
        LayerInputs(query[:, p - window : p], key[:, :p], value[:, :p], scale=scale)
        for query, key, value, scale in plain.layers
    ]
    return p, decide(config, inputs)


def choices(logits: torch.Tensor, tokens: Tokens, top: int) -> list[Choices]:
    """At each place the most likely tokens, and that of the answer."""
    found = logits.log_softmax(-1)
    best, own = found.topk(top), found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    rows = zip(best.indices.tolist(), best.values.tolist(), tokens, own.tolist(), strict=True)
    return [dict(zip(ids, likely, strict=True)) | {token: value} for ids, likely, token, value in rows]


@torch.inference_mode()
def measure(
    plain: Plain, prompt: list[int], answer: Answer, asked: Sequence[Column], top: int
) -> list[Fidelity]:
    """One answer in all columns."""
    n, tokens = len(prompt), [*prompt, *answer.tokens[:-1]]
    full = choices(plain.whole(tokens, len(answer.tokens)), answer.tokens, top)
    answer = replace(answer, choices=[{str(one): value for one, value in row.items()} for row in full])
    found = []
    for column in asked:
        rows, started = full, time.perf_counter()
        if column.budget is not None and n + (column.lookahead or 0) < len(tokens):
            at, kept = decided(plain, column, n)
            first = at - n + 1
            later = choices(plain.behind(tokens, at, kept), answer.tokens[first:], top)
            rows = [*full[:first], *later]
        evict_at = None if column.budget is None else n
        found.append(score(answer, column, rows, evict_at, False, time.perf_counter() - started))
    return found


async def prompts(plain: Plain, answers: Sequence[Answer], settings: Any) -> dict[Any, Case]:
    """The cases that were asked."""
    names = list(dict.fromkeys(answer.task.removeprefix(TEXT) for answer in answers))
    lengths = list(dict.fromkeys(answer.length or 0 for answer in answers))
    samples = 1 + max(answer.index for answer in answers)
    asked = TextQuestions(names, lengths, samples, settings.seed, settings.form, {}, settings.slack)
    return {case.sample: case for case in await cases(asked, plain, 1, lambda: None)}  # type: ignore[arg-type]


async def run(folder: Path, wanted: Sequence[Column], command: Sequence[str]) -> None:
    """Measure the folder's answers in all columns, but for what was measured before."""
    settings, _ = read_settings(folder, Fidelity)
    answers = list(read(folder / ANSWERS, Answer))
    plain = Plain(checkpoint.build())
    asked = await prompts(plain, answers, settings)
    with Store(folder / OFFLINE / FIDELITY, Fidelity) as store:
        about = record(command, {"server": {"url": OFFLINE}})
        write_settings(folder / OFFLINE, settings, about, Fidelity, bool(store.done))
        for answer in answers:
            left = [column for column in wanted if (answer.sample, column) not in store.done]
            prompt = await plain.tokenize(asked[answer.sample].prompt())
            check_prompt(answer, prompt, asked[answer.sample])
            for one in measure(plain, prompt, answer, left, settings.top or 20) if left else ():
                store.add(one)


def sides(folder: Path, tokens: int) -> list[Fidelity]:
    """Both sides' measures of the answers that both have, of the first tokens of each; offline's say so."""
    served, ours = (list(read(path / FIDELITY, Fidelity)) for path in (folder, folder / OFFLINE))
    shared = {one.key for one in served} & {one.key for one in ours}
    named = [*served, *(replace(one, policy=f"{one.policy}@{OFFLINE}") for one in ours)]
    return [
        replace(one, agrees=one.agrees[: tokens - 1], divergences=one.divergences[: tokens - 1])
        for one, key in zip(named, (one.key for one in (*served, *ours)), strict=True)
        if key in shared
    ]


def lines(measures: Sequence[Fidelity]) -> list[str]:
    """One table, a line for each policy, lookahead and budget."""
    kl, agrees, later = (
        Scores(one.measure(getattr(one, name)) for one in measures if getattr(one, name))
        for name in ("divergences", "agrees", "later")
    )
    rows = []
    for served in sorted((one for one in kl.columns if one.budget and OFFLINE not in one.policy), key=str):
        ours = replace(served, policy=f"{served.policy}@{OFFLINE}")
        base = replace(served, policy=f"{served.asked}:lookahead=0")
        cells = [mean.mean(one) for mean in (kl, later, agrees) for one in (served, ours)]
        cells += [kl.ratio(served, ours), kl.ratio(served, base)]
        cells.append(behind(measures, served, base))
        rows.append([served.policy, served.budget, *(cell or NONE for cell in cells)])
    return table(HEAD, rows)


def behind(measures: Sequence[Fidelity], column: Column, base: Column) -> Mean | None:
    """KL of the tokens behind a column's exact ones, over that of the same tokens in another column."""
    both = [one for one in measures if one.column in (column, base)]
    cut = [(one, one.divergences[int(column.lookahead or 0) :]) for one in both]
    return Scores(one.measure(values) for one, values in cut if values).ratio(column, base)


def report(folder: Path) -> str:
    """All tables: answers' first tokens, of all answers and of long ones."""
    parts = [f"# Lookahead, served and offline\n\n{MEANING}"]
    long = {one.sample for one in read(folder / ANSWERS, Answer) if len(one.tokens) > LONG}
    for tokens in LENGTHS:
        found = sides(folder, tokens)
        for title, samples in (("all", {one.sample for one in found}), (f"above {LONG} tokens", long)):
            mine = [one for one in found if one.sample in samples]
            answers = len({one.sample for one in mine})
            parts += [f"## First {tokens} tokens of answers, {title}: {answers}", "\n".join(lines(mine))]
    return "\n\n".join([*parts, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the tables; the exit code."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("folder", type=Path, help="that `quality fidelity` wrote, with chats in scope prompt")
    parser.add_argument("--policies", nargs="+", type=parse_policy, required=True, help=f"each as {GRAMMAR}")
    parser.add_argument("--budgets", nargs="+", type=parse_budget, required=True, help="shares, or tokens")
    options = parser.parse_args(argv)
    asked = columns([FULL, *options.policies], options.budgets, ["prompt"])
    asyncio.run(
        run(options.folder, asked, ["python", "-m", PROGRAM, *(sys.argv[1:] if argv is None else argv)])
    )
    (options.folder / f"{OFFLINE}.md").write_text(report(options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
