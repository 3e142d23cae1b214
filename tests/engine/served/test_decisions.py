"""The engine keeps what the policies keep when they are given the tensors of the model as Hugging Face defines it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.engine.support.masked import check_logits, layer_inputs
from tests.engine.support.running import Answer, Ask, evicting_engine, plain_prompts, run
from tests.real_model import real_model
from vllm_kvevict.policies import EvictionConfig, LayerInputs, available, score_layer, select
from vllm_kvevict.policies.inputs import ROTARY
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.quality import texts
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

EVICTING = [policy for policy in available() if policy != "full"]
UNDOING = [policy for policy in EVICTING if ROTARY in lookup(policy).needs]
LENGTH, PREFIX = 300, 280
QUESTION = "\n\nQuestion: In one sentence, what is the text above about?\nAnswer:"


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_policy_decides_from_the_models_tensors(models, architecture):
    """Queries across chunks, keys and values from pages, column sums, output projections: all reach the policy."""
    check(models(architecture, layers=3), EVICTING)


@pytest.mark.engine
def test_other_rotary_embeddings_are_undone(models):
    """Of glm4, half of the dimensions are turned, neighbours together; other kinds are in tests of the worker."""
    check(models("glm4", layers=3), UNDOING)


@pytest.mark.engine
def test_a_real_model_and_real_prose():
    """Random models have attention that looks at everything alike. Here a few tokens take most of it, as in use."""
    check(real_model(), EVICTING, prose())


def prose() -> list[int]:
    """A prompt of the real model, a text and a question."""
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    question = tokenizer(QUESTION)["input_ids"]
    text = tokenizer(" ".join(texts.sentences()[:100]))["input_ids"]
    tokens: list[int] = text[: LENGTH - len(question)] + question
    return tokens


def check(model, policies, tokens=()):
    asks = [
        Ask(LENGTH, policy, 0.2, PREFIX if seed % 2 else None, max_tokens=2, tokens=tokens)
        for seed, policy in enumerate(policies)
    ]
    with evicting_engine(model, max_model_len=1024, max_num_batched_tokens=100) as llm:
        answers, prompts = run(llm, asks), plain_prompts(llm)
    inputs = {
        n: layer_inputs(model, asks[0].prompt[:n], prompts.behind(asks[0].prompt[:n]))
        for n in (PREFIX, LENGTH)
    }
    for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        config = ask.config()
        check_kept(config, inputs[ask.evicted_to], answer)
        if tokens:  # the control: another policy keeps something else
            with pytest.raises(AssertionError):
                check_kept(config, inputs[ask.evicted_to], answers[place - 2])


def check_evicted(
    model: Path,
    ask: Ask,
    answer: Answer,
    prompts: RepeatPrompts,
    sees: str = "all",
    chunk: int | None = None,
    **params: Any,
) -> None:
    """What was kept is what the policy decides from the model's tensors; the logits are of one that sees that."""
    prompt = ask.prompt[: ask.evicted_to]
    inputs = layer_inputs(model, prompt, prompts.behind(prompt), chunk=chunk, sees=sees)
    check_kept(ask.config(**params), inputs, answer)
    check_logits(model, ask, answer)


def check_scores(expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
    """Scores are right up to rounding."""
    if expected is not None and found is not None:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))


def check_kept(config: EvictionConfig, inputs: list[LayerInputs], answer: Answer) -> None:
    """What a request kept is what a configuration makes of a model's tensors, up to entries at the cut."""
    scores = [score_layer(config, x, i, len(inputs)) for i, x in enumerate(inputs)]
    expected = select(config, scores, inputs[0].num_tokens)
    for layer, heads in enumerate(expected):
        check_scores(scores[layer].scores, answer.scores[0].get(layer))
        kept = answer.kept[0][layer]
        assert [len(head) for head in kept] == [len(head) for head in heads], (config, layer)
        for head, positions in enumerate(heads):
            swapped = set(kept[head]) ^ set(positions.tolist())
            if swapped:
                # Windows are always kept, and so is what nothing scores.
                found = scores[layer].scores
                assert found is not None and max(swapped) < found.shape[1], (config, layer, head)
                near = found[head, list(swapped)]
                assert near.max() - near.min() <= 1e-5 * near.abs().max(), (config, layer, head)
