"""On a real model and real prose the engine keeps what the policies keep of Hugging Face's tensors.

Random models have attention that looks at everything alike. Here a few tokens take most of it, as in use.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.served.test_decisions import EVICTING, check_choice
from tests.engine.served.test_kvzip import model_inputs
from tests.engine.support.running import Answer, Ask, evicting_engine, plain_prompts, run
from tests.real_model import real_model
from vllm_kvevict.policies import EvictionConfig, LayerInputs, parameters, score_layer
from vllm_kvevict.quality import texts
from vllm_kvevict.schedules.registry import bounded_policies

POLICIES = [policy for policy in EVICTING if policy not in bounded_policies()]
"""Those that evict when the prompt has been read."""
BUDGET, LENGTH, CHUNK = 0.2, 600, 256
QUESTION = "\n\nQuestion: In one sentence, what is the text above about?\nAnswer:"
SERVER: dict[str, Any] = {
    "max_model_len": 2048,  # so that a chunk that kvzip repeats has room behind the prompt
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": True,  # as by default; most policies then begin with KV that the first one has left
}


@dataclass
class Reading(Ask):
    """A request about real prose; ``seed`` chooses where it begins."""

    @cached_property
    def tokens(self) -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(real_model())
        question = tokenizer(QUESTION)["input_ids"]
        prose = " ".join(texts.sentences()[100 * self.seed :][:100])
        return tokenizer(prose)["input_ids"][: self.length - len(question)] + question

    @property
    def prompt(self) -> list[int]:
        return self.tokens


@pytest.fixture(scope="module")
def served() -> tuple[dict[str, Answer], list[LayerInputs]]:
    """By policy what an engine answered, and what policies read of each layer of the same prompt."""
    model, asks = real_model(), [Reading(LENGTH, policy, BUDGET, max_tokens=2) for policy in POLICIES]
    with evicting_engine(model, **SERVER) as llm:
        answers = [*run(llm, asks[:1]), *run(llm, asks[1:])]
        prompts = plain_prompts(llm)
    inputs = model_inputs(model, asks[0].prompt, prompts, "all", chunk=parameters("kvzip")["kvzip_chunk"])
    return dict(zip(POLICIES, answers, strict=True)), inputs


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_what_the_policy_decides(served, policy):
    answers, inputs = served
    config = EvictionConfig(policy, keep_ratio=BUDGET)
    scores = [score_layer(config, x, layer, len(inputs)) for layer, x in enumerate(inputs)]
    check_choice(config, scores, LENGTH, answers[policy])
    for other, answer in answers.items():
        if other != policy:
            with pytest.raises(AssertionError):
                check_choice(config, scores, LENGTH, answer)
