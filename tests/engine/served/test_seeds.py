"""A request with a seed draws the same tokens however its prompt is cut."""

import pytest
from vllm import SamplingParams

from tests.engine.support.running import Ask, evicting_engine


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["full", "ada-snapkv", "take"])
def test_cut_prompts(models, policy):
    asks = [Ask(300, policy, seed=i) for i in range(2)]
    fields = {"kv_eviction": policy}
    sampling = [
        SamplingParams(max_tokens=6, temperature=1.0, seed=7 + i, ignore_eos=True, extra_args=fields)
        for i in range(2)
    ]
    answers = []
    for step in (96, 1024):
        eviction = {"policy": "take", "budget": 64, "take_chunk": 512, "take_probe": 16}
        with evicting_engine(models("llama"), eviction=eviction, max_num_batched_tokens=step) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": ask.prompt} for ask in asks], sampling, use_tqdm=False
            )
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
