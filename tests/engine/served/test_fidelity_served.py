"""Fidelity measured over HTTP: the full cache agrees with itself, and KL is that of a masked Hugging Face model."""

import json
import math
import random
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.quality import NEEDLE
from tests.engine.support.masked import evicted_layers, masked_logits
from tests.engine.support.serving import ON_REQUEST, ForkedServer
from vllm_kvevict.policies import parameters
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.fidelity import ANSWERS, FIDELITY, Answer, Fidelity
from vllm_kvevict.quality.results import Column, read
from vllm_kvevict.quality.tasks import make

BUDGET, HEADS, TOP, LENGTH = 0.2, 4, 20, 12
STREAMING = {scope: Column("streaming-llm", BUDGET, scope) for scope in ("prompt", "prefix")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder of measures of a server's answers to three documents with a question each."""
    folder = tmp_path_factory.mktemp("fidelity")
    samples = [make("passage", length, random.Random(length)) for length in (300, 350, 400)]
    lines = [{"document": sample.context, "question": sample.question} for sample in samples]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ForkedServer(
        NEEDLE, folder / "server.log", *ON_REQUEST, "--kv-eviction-config.min_prompt", "0"
    ) as server:
        command = ["fidelity", "--url", f"{server.url}/v1", "--output", str(folder)]
        command += ["--prompts", str(folder / "prompts.jsonl"), "--answer-tokens", str(LENGTH)]
        command += ["--policies", "streaming-llm", "ada-snapkv", "--budgets", str(BUDGET), "1"]
        assert quality.main([*command, "--scopes", "prompt", "prefix"]) == 0
        # The prompts' tokens, which the masked model reads.
        tokens = [_tokens(server, line) for line in lines]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    return folder


def _tokens(server: ForkedServer, line: dict[str, str]) -> list[int]:
    chat = [{"role": "user", "content": f"{line['document']}\n\n{line['question']}"}]
    body = {"model": server.model, "messages": chat, "add_generation_prompt": True}
    return list(httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"])


def measures(folder: Path, column: Column) -> list[Fidelity]:
    return [one for one in read(folder / FIDELITY, Fidelity) if one.column == column]


def agreement(found: list[Fidelity]) -> float:
    tokens = [agrees for one in found for agrees in one.agrees]
    return sum(tokens) / len(tokens)


@pytest.mark.engine
def test_the_full_cache_agrees_with_itself_and_budget_one_with_it(measured):
    own = measures(measured, Column("full"))
    assert len(own) == 3 and agreement(own) == 1.0
    assert max(value for one in own for value in one.divergences) < 1e-5
    for scope in STREAMING:
        whole = measures(measured, Column("ada-snapkv", 1.0, scope))
        assert len(whole) == 3 and agreement(whole) == 1.0


def kept(n: int) -> list[int]:
    """What streaming-llm keeps of n tokens: the first ones, and the last ones up to the budget."""
    sinks, budget = parameters("streaming-llm")["sinks"], math.floor(BUDGET * n)
    return [*range(sinks), *range(n - (budget - sinks), n)]


def reference(full: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL of every row [rows, vocabulary] over what both list, and the rest as one, in nats."""
    total = torch.zeros(len(full), dtype=torch.float64)
    for row in range(len(full)):
        p, q = (logits[row].double().softmax(-1) for logits in (full, found))
        token = int(p.argmax())
        mine, theirs = (set(side.topk(TOP).indices.tolist()) | {token} for side in (p, q))
        listed = torch.zeros(len(p), dtype=torch.bool)
        listed[sorted(mine & theirs)] = True
        groups = [torch.cat([side[listed], side[~listed].sum()[None]]) for side in (p, q)]
        total[row] = torch.nn.functional.kl_div(groups[1].log(), groups[0], reduction="sum")
    return total


@pytest.mark.engine
@pytest.mark.parametrize("scope", STREAMING)
def test_divergence_is_that_of_a_masked_model(measured, scope):
    answers = {answer.index: answer for answer in read(measured / ANSWERS, Answer)}
    prompts = json.loads((measured / "tokens.json").read_text())
    layers = range(len(evicted_layers(NEEDLE)))
    largest = 0.0
    for one in measures(measured, STREAMING[scope]):
        prompt, generated = prompts[one.index], list(answers[one.index].tokens)
        assert (one.evict_at == len(prompt)) == (scope == "prompt") and one.evict_at <= len(prompt)
        some, other = (dict.fromkeys(layers, [kept(one.evict_at)[first:]] * HEADS) for first in (0, 3))
        full = masked_logits(NEEDLE, prompt, generated)
        masked = masked_logits(NEEDLE, prompt, generated, [(one.evict_at, some)])
        assert full.argmax(-1).tolist() == generated
        expected = reference(full, masked)[one.first :]
        assert torch.tensor(one.divergences, dtype=torch.float64) == pytest.approx(expected, abs=1e-3)
        assert list(one.agrees) == (masked.argmax(-1) == full.argmax(-1)).tolist()[one.first :]
        places = torch.arange(len(generated)), torch.tensor(generated)
        change = (masked.log_softmax(-1) - full.log_softmax(-1))[places][one.first :]
        assert list(one.differences) == pytest.approx(change.tolist(), abs=1e-3)
        largest = max(largest, float(expected.max()))
        # Control: another cut is told from this one.
        wrong = reference(full, masked_logits(NEEDLE, prompt, generated, [(one.evict_at, other)]))[
            one.first :
        ]
        assert (wrong - expected).abs().max() > 1e-3
    assert largest > 0.01
