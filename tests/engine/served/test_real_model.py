"""On a real model and real prose the engine keeps what the policies keep of Hugging Face's tensors.

Random models have attention that looks at everything alike. Here a few tokens take most of it, as in use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.served.test_decisions import EVICTING, check_choice, check_kept
from tests.engine.served.test_kvzip import model_inputs
from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Answer, Ask, evicting_engine, plain_prompts, run
from tests.real_model import real_model
from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, parameters, score_layer
from vllm_kvevict.quality import texts
from vllm_kvevict.schedules.registry import bounded_policies

POLICIES = [policy for policy in EVICTING if policy not in bounded_policies()]
"""Those that evict when the prompt has been read."""
ANSWERING = "ada-snapkv"
TUNED = {"rows": "max", "gqa": "mean", "pooling": "avg"}
BUDGET, LENGTH, CHUNK, TOKENS = 0.2, 600, 256, 8
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


@dataclass
class Served:
    """What engines answered, and what policies read of the same prompt.

    Attributes:
        answers: by policy.
        tuned: of one of them with other parameters.
        inputs: of each layer.
    """

    answers: dict[str, Answer]
    tuned: Answer
    inputs: list[LayerInputs]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One engine for all policies with their defaults, and one whose own policy has other parameters."""
    model = real_model()
    asks = [
        Reading(LENGTH, policy, BUDGET, max_tokens=TOKENS if policy == ANSWERING else 2)
        for policy in POLICIES
    ]
    with evicting_engine(model, **SERVER) as llm:
        answers = [*run(llm, asks[:1]), *run(llm, asks[1:])]
        prompts = plain_prompts(llm)
    tuned = asked_of_a_tuned_engine()
    chunk = parameters("kvzip")["kvzip_chunk"]
    inputs = model_inputs(model, asks[0].prompt, prompts, "all", chunk=chunk)
    yield Served(dict(zip(POLICIES, answers, strict=True)), tuned, inputs)


def asked_of_a_tuned_engine() -> Answer:
    with evicting_engine(real_model(), eviction={"policy": ANSWERING, **TUNED}, **SERVER) as llm:
        return run(llm, [Reading(LENGTH, ANSWERING, BUDGET, max_tokens=2)])[0]


def scored(config: EvictionConfig, inputs: list[LayerInputs]) -> list[LayerScores]:
    return [score_layer(config, x, layer, len(inputs)) for layer, x in enumerate(inputs)]


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_what_the_policy_decides(served, policy):
    config = EvictionConfig(policy, keep_ratio=BUDGET)
    scores = scored(config, served.inputs)
    check_choice(config, scores, LENGTH, served.answers[policy])
    for other, answer in served.answers.items():
        if other != policy:
            with pytest.raises(AssertionError):
                check_choice(config, scores, LENGTH, answer)


@pytest.mark.engine
def test_keeps_what_other_parameters_decide(served):
    config = EvictionConfig(ANSWERING, keep_ratio=BUDGET, **TUNED)
    scores = scored(config, served.inputs)
    check_choice(config, scores, LENGTH, served.tuned)
    with pytest.raises(AssertionError):
        check_choice(config, scores, LENGTH, served.answers[ANSWERING])
    for name in TUNED:
        others = {key: value for key, value in TUNED.items() if key != name}
        with pytest.raises(AssertionError):
            check_kept(EvictionConfig(ANSWERING, keep_ratio=BUDGET, **others), served.inputs, served.tuned)


@pytest.mark.engine
def test_answers_what_the_model_says_without_the_evicted_entries(served):
    model, prompt = real_model(), Reading(LENGTH).prompt
    answer, other = served.answers[ANSWERING], served.answers["streaming-llm"]
    logits = masked_logits(model, prompt, answer.tokens, answer.kept[0], LENGTH)
    assert logits.argmax(-1).tolist() == answer.tokens
    # Control: what another policy kept changes what the model says.
    wrong = masked_logits(model, prompt, answer.tokens, other.kept[0], LENGTH)
    assert (wrong - logits)[1:].abs().max() > 0.1
