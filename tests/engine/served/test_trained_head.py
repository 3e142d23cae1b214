"""A trained EAGLE-3 head guesses nearly as well while the model that it drafts for loses most of its KV."""

import random

import pytest
from transformers import AutoTokenizer

from benchmarks.harness.sides import Engine, Probe
from benchmarks.micro.drafts import BUDGETS, accepted
from benchmarks.quality import NEEDLE
from tests.engine.support.running import evicting_engine
from tests.engine.support.trained_head import save, train, trained_head
from vllm_kvevict.quality.tasks import make

pytestmark = pytest.mark.engine


def shares(head, budgets) -> list[float]:
    """What of its drafts is accepted at each budget, in long answers."""
    render, choose, asked = AutoTokenizer.from_pretrained(NEEDLE).apply_chat_template, random.Random(0), []
    for task in ("multiquery", "chain", "passage") * 8:
        sample = make(task, 1000, choose)
        chat = [{"role": "system", "content": sample.context}, {"role": "user", "content": sample.question}]
        asked.append((render(chat, add_generation_prompt=True, return_dict=False), 0))
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with evicting_engine(NEEDLE, speculative_config=drafts) as llm:
        engine = Engine(llm, Probe(llm))
        counts = [accepted(engine, asked, "ada-snapkv", budget) for budget in budgets]
    print(counts)
    return [right / drafted for right, drafted in counts]


def test_a_trained_head_guesses_nearly_as_well_at_small_budgets():
    whole, *less = shares(trained_head(), BUDGETS)
    assert whole > 0.3
    assert min(less) >= 0.85 * whole


def test_control_a_head_that_was_not_trained(tmp_path):
    assert shares(save(train([]), tmp_path), [1.0])[0] < 0.05
