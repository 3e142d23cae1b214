"""A prompt is evicted once the answer has begun: its first tokens are exact, and choose."""

import pytest
import torch

from tests.engine.support.masked import expected_logits
from tests.engine.support.running import Ask, engine, evicting_engine, num_preemptions, run, run_preempted


@pytest.mark.engine
@pytest.mark.parametrize("ahead", [8, 48])
@pytest.mark.parametrize(
    "policy",
    [
        "snapkv",
        "streaming-llm",
        "knorm",
        "tova",
        "ada-snapkv",
        "pyramidkv",
        "ada-pyramid",
        "vatp-snapkv",
        "criticalkv",
        "ada-criticalkv",
        "keydiff",
        "lava-uniform",
        "defensivekv",
    ],
)
def test_a_prompt_is_evicted_later(models, policy, ahead):
    model = models("llama")
    asks = [
        Ask(300, policy, 0.2, max_tokens=80),
        Ask(200, policy, 0.3, max_tokens=60, seed=1),
        Ask(180, policy, 0.3, max_tokens=20, seed=2),
    ]
    with engine(model) as llm:
        stock = run(llm, asks, recorded=False)
    options = {"policy": policy, "budget": 0.2, "lookahead": ahead}
    for preempt_at in (-1, 40):
        with evicting_engine(model, eviction=options) as llm:
            answers = run_preempted(llm, asks, preempt_at, logits=True, recorded=True)
            assert (preempt_at > 0) == (num_preemptions(llm) > 0)
        for ask, answer, plain in zip(asks, answers, stock):
            n = ask.evicted_to
            assert answer.tokens[: ahead + 1] == plain.tokens[: ahead + 1]
            if ask.max_tokens > ahead:
                kept = [len(x) for heads in answer.kept[0].values() for x in heads]
                assert sum(kept) == len(kept) * (ask.config().budget_for(n) + ahead)
            expected = expected_logits(model, ask, answer, at=[n + ahead] * len(answer.kept))
            assert torch.allclose(answer.logits, expected, atol=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize("room", [512, 33])
def test_hits_and_chunks(models, room):
    """Prompts in chunks, and one that begins as another did: the same answers."""
    model = models("llama")
    asks = [Ask(300, "snapkv", 0.2, max_tokens=80)]
    options = {"policy": "snapkv", "budget": 0.2, "lookahead": 16}
    with evicting_engine(
        model,
        eviction=options,
        enable_prefix_caching=True,
        max_num_batched_tokens=room,
        max_model_len=512,
        enable_chunked_prefill=True,
    ) as llm:
        first = run(llm, asks, logits=True)
        second = run(llm, asks * 2, logits=True)
        print([m for m in llm.get_metrics() if "hit" in m.name or "quer" in m.name])
    for answer in (*first, *second):
        assert answer.tokens == first[0].tokens and answer.kept[0] == first[0].kept[0]
        expected = expected_logits(model, asks[0], answer, at=[316])
        assert torch.allclose(answer.logits, expected, atol=1e-4)
