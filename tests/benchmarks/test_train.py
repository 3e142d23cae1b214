"""What the small model is taught: texts whose targets are their own next tokens, and the steps that learn them."""

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.quality.train import (
    MAX_POSITIONS,
    Conversations,
    answers_right,
    config,
    learn,
    make_optimizers,
)


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("repeats", [True, False])
def test_targets_are_the_next_tokens_of_answers(length, repeats):
    data = Conversations(0)
    data.repeats, data.jumps = repeats, not repeats
    ids, positions, targets = data.batch(length, 8, (0.4, 0.6))
    assert ids.shape == positions.shape == targets.shape == (8, length)
    chosen = targets[:, :-1] >= 0
    assert chosen.any(1).all()
    assert (targets[:, :-1] == ids[:, 1:])[chosen].all()
    assert (positions.diff() >= 1).all() and int(positions.max()) < MAX_POSITIONS
    assert repeats or bool((positions.diff() > 1).any())


def test_answers_count_only_whole():
    targets = torch.tensor([[-100, 3, 4, -100, 5, -100, 6, 7]])
    guesses = torch.tensor([[9, 3, 4, 9, 0, 9, 6, 7]])
    assert answers_right(guesses, targets) == (1, 2)


def test_a_step_lowers_the_loss():
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(64, 2))
    batch = Conversations(0).batch(64, 4, (0.4, 0.6))
    optimizers = make_optimizers(model, 3e-3)
    losses = [learn(model, optimizers, batch)[0] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    right, answers = answers_right(torch.where(batch[2] < 0, 0, batch[2]), batch[2])
    assert right == answers > 0
