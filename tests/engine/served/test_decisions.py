"""The engine keeps what the policies keep when they are given the tensors of the model as Hugging Face defines it."""

import pytest

from tests.engine.support.masked import layer_inputs
from tests.engine.support.running import Answer, Ask, evicting_engine, plain_prompts, run
from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    needs,
    score_layer,
    select,
)

EVICTING = [policy for policy in available() if policy != "full"]


UNDOING = [policy for policy in EVICTING if "rotary" in needs(policy)]


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_policy_decides_from_the_models_tensors(models, architecture):
    """Queries across chunks, keys and values from pages, column sums, output projections: all reach the policy."""
    check(models(architecture, layers=3), EVICTING)


@pytest.mark.engine
def test_other_rotary_embeddings_are_undone(models):
    """Of glm4, half of the dimensions are turned, neighbours together; other kinds are in tests of the worker."""
    check(models("glm4", layers=3), UNDOING)


def check(model, policies):
    asks = [
        Ask(300, policy, 0.2, prefix_len=280 if seed % 2 else None) for seed, policy in enumerate(policies)
    ]
    with evicting_engine(model, max_model_len=1024, max_num_batched_tokens=100) as llm:
        answers, prompts = run(llm, asks), plain_prompts(llm)
    inputs = {n: layer_inputs(model, asks[0].prompt[:n], prompts) for n in (280, 300)}
    for ask, answer in zip(asks, answers, strict=True):
        config = EvictionConfig(ask.policy, keep_ratio=ask.budget)
        check_kept(config, inputs[ask.prefix_len or ask.length], answer)


def check_kept(config: EvictionConfig, inputs: list[LayerInputs], answer: Answer) -> None:
    """What a request kept is what a configuration makes of a model's tensors, up to entries at the cut."""
    scores = [score_layer(config, x, i, len(inputs)) for i, x in enumerate(inputs)]
    check_choice(config, scores, inputs[0].num_tokens, answer)


def check_choice(config: EvictionConfig, scores: list[LayerScores], n: int, answer: Answer) -> None:
    """What a request kept is what a configuration chooses by these scores, up to entries at the cut."""
    expected = select(config, scores, n)
    for layer, heads in enumerate(expected):
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
