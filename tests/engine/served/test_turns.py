"""Prompts that are evicted part by part (`kv_turns`): against the plain model, at every part, whatever interrupts."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from tests.engine.support.masked import CLOSE, check_logits, expected_logits, layer_inputs
from tests.engine.support.running import Answer, Ask, evicting_engine, plain_prompts, run
from vllm_kvevict.policies import decide
from vllm_kvevict.policies.registry import policies_for_parts
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

ABLE = [policy for policy in policies_for_parts() if policy != "full"]
RATIO, LEAST = 0.25, 16
OPTIONS = {"min_turn": LEAST, "check": True}


def ends_of(ask: Ask) -> list[int]:
    """After how many tokens it is evicted: short parts wait for the next."""
    ends: list[int] = [ask.whole] if ask.whole else []
    for end in ask.turns:
        if end - (ends[-1] if ends else 0) >= LEAST:
            ends.append(end)
    return ends


def check_kept(ask: Ask, answer: Answer) -> None:
    """What was kept of a part stays as it is, and each part keeps its share of its own tokens, or the first one all."""
    ends = ends_of(ask)
    assert len(answer.kept) == len(ends)
    for (begins, end), (before, kept) in zip(
        itertools.pairwise([0, *ends]), itertools.pairwise([{}, *answer.kept]), strict=True
    ):
        rows = [(layer, head, row) for layer, heads in kept.items() for head, row in enumerate(heads)]
        for layer, head, row in rows:
            assert [x for x in row if x < begins] == (before[layer][head] if before else [])
        own = sum(sum(begins <= x < end for x in row) for _, _, row in rows)
        assert own == len(rows) * (end if end == ask.whole else int(RATIO * (end - begins)))


@pytest.mark.engine
@pytest.mark.parametrize("policy", ABLE)
def test_each_policy(models, policy: str) -> None:
    model = models("llama", heads=4, kv_heads=2)
    asks = [
        Ask(330, policy, RATIO, turns=(96, 200, 290)),
        Ask(250, policy, RATIO, turns=(60, 70, 75, 250), seed=1),
        Ask(120, policy, RATIO, turns=(100,), seed=2),
        Ask(300, policy, RATIO, turns=(60, 150, 260), whole=60, seed=3),
    ]
    with evicting_engine(model, eviction=OPTIONS) as llm:
        answers = run(llm, asks, logits=True)
        prompts = plain_prompts(llm)
    for ask, answer in zip(asks, answers, strict=True):
        check_kept(ask, answer)
        check_logits(model, ask, answer, ends_of(ask))
    check_choice(model, asks[0], answers[0], prompts)
    check_choice(model, asks[3], answers[3], prompts)
    # The control: had the second part kept other entries, the answer would be another.
    moved = dataclasses.replace(
        answers[0], kept=[answers[0].kept[0], *answers[1].kept[1:2], answers[0].kept[2]]
    )
    with pytest.raises(AssertionError):
        check_kept(asks[0], moved)
    evicted_once = dataclasses.replace(answers[0], kept=answers[0].kept[:1])
    unlike = expected_logits(model, asks[0], evicted_once, ends_of(asks[0])[:1])
    assert not torch.allclose(answers[0].logits, unlike, **CLOSE)


def check_choice(model: Path, ask: Ask, answer: Answer, prompts: RepeatPrompts) -> None:
    """What was kept is what the policy chooses from the plain model's tensors."""
    config, ends = ask.config(), ends_of(ask)
    events = list(zip(ends, answer.kept, strict=True))
    same = total = 0
    for done, (begins, (end, kept)) in enumerate(zip([0, *ends], events, strict=False)):
        if end == ask.whole:
            continue
        inputs = layer_inputs(model, ask.prompt[:end], prompts, begins, events[:done])
        part = config.for_part(end - begins, begins)
        for layer, heads in enumerate(decide(part, inputs)):
            for head, chosen in enumerate(heads):
                found = {x - begins for x in kept[layer][head] if x >= begins}
                same, total = same + len(found & set(chosen.tolist())), total + len(chosen)
    # Scores of two implementations of a model differ in their last bits, and some are nearly equal.
    assert same >= 0.99 * total


@pytest.mark.engine
def test_repeats_of_later_parts_hold_what_was_counted(models) -> None:
    """With more sinks at the front than such repeats may see: check mode compares pages while they run."""
    seen = {"kvzip_sees": "chunk", "kvzip_chunk": 64, "sinks": 250}
    options = {**OPTIONS, "policy_params": {"kvzip": seen}}
    model, ask = models("llama", heads=4, kv_heads=2), Ask(620, "kvzip", 0.9, turns=(400, 500, 600))
    with evicting_engine(model, eviction=options, max_model_len=1024) as llm:
        (answer,) = run(llm, [ask])
    stored = [sum(len(row) for heads in kept.values() for row in heads) for kept in answer.kept]
    assert stored == [8 * 360, 8 * 450, 8 * 540]
