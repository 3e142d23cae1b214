"""The engine keeps what the policies keep when they are given the tensors of the model as Hugging Face defines it."""

import pytest

from tests.engine.masked import layer_inputs
from tests.engine.running import Ask, evicting_engine, plain_prompts, run
from vllm_kvevict.policies import EvictionConfig, available, score_layer, select

EVICTING = [policy for policy in available() if policy != "full"]


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_policy_decides_from_the_models_tensors(models, architecture):
    """Queries across chunks, keys and values from pages, column sums, output projections: all reach the policy."""
    model = models(architecture, layers=3)
    asks = [
        Ask(300, policy, 0.2, prefix_len=280 if seed % 2 else None) for seed, policy in enumerate(EVICTING)
    ]
    with evicting_engine(model, max_num_batched_tokens=100) as llm:
        answers, prompts = run(llm, asks), plain_prompts(llm)
    inputs = {n: layer_inputs(model, asks[0].prompt[:n], prompts) for n in (280, 300)}
    for ask, answer in zip(asks, answers, strict=True):
        n = ask.prefix_len or ask.length
        config = EvictionConfig(ask.policy, keep_ratio=ask.budget)
        scores = [score_layer(config, x, i, len(inputs[n])) for i, x in enumerate(inputs[n])]
        expected = select(config, scores, n)
        for layer, heads in enumerate(expected):
            kept = answer.kept[0][layer]
            assert [len(head) for head in kept] == [len(head) for head in heads], (ask, layer)
            for head, positions in enumerate(heads):
                swapped = set(kept[head]) ^ set(positions.tolist())
                if swapped:
                    near = scores[layer].scores[head, list(swapped)]
                    assert near.max() - near.min() <= 1e-5 * near.abs().max(), (ask, layer, head)
