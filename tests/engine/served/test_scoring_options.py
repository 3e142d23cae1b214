"""How a policy combines attention, as a server's parameters say: of rows, of query heads, of neighbours."""

import pytest
import torch

from tests.engine.served.test_decisions import check_kept
from tests.engine.served.test_kvzip import LAYOUTS, SERVER
from tests.engine.support.masked import layer_inputs, masked_logits
from tests.engine.support.running import Ask, evicting_engine, run
from tests.registering import policy_with_both_defaults
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

BEST = {"rows": "max", "gqa": "max", "pooling": "decay"}


def check(model, ask, answer, **params) -> None:
    """What was kept is what the parameters say, and the logits are those of a model that sees nothing else."""
    n = ask.prefix_len or ask.length
    config = EvictionConfig(ask.policy, keep_ratio=ask.budget, **params)
    check_kept(config, layer_inputs(model, ask.prompt[:n], RepeatPrompts()), answer)
    wanted = masked_logits(model, ask.prompt, answer.tokens, answer.kept[0], n)
    torch.testing.assert_close(answer.logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize("layout", LAYOUTS)
def test_maxima_that_fade(model, layout):
    """The window straddles steps; with the question in view, and without."""
    asks = [Ask(310, "ada-snapkv", 0.2), Ask(300, "ada-snapkv", 0.2, prefix_len=280, seed=1)]
    with evicting_engine(
        model, eviction={"policy": "ada-snapkv", **BEST}, **SERVER, **LAYOUTS[layout]
    ) as llm:
        answers = run(llm, asks, logits=True)
    for ask, answer in zip(asks, answers, strict=True):
        check(model, ask, answer, **BEST)
        for name, other in (("rows", "mean"), ("gqa", "mean"), ("pooling", "max")):
            with pytest.raises(AssertionError):
                check(model, ask, answer, **{**BEST, name: other})


@pytest.mark.engine
@pytest.mark.parametrize("defaults", ["measured", "paper"])
def test_whose_defaults_a_server_takes(models, defaults, monkeypatch):
    """For a request that names the policy, which is not the server's."""
    policy = policy_with_both_defaults(monkeypatch)
    model, ask = models("llama", layers=3), Ask(300, policy, 0.2)
    with evicting_engine(model, eviction={"defaults": defaults}, **SERVER) as llm:
        (answer,) = run(llm, [ask], logits=True)
    check(model, ask, answer, defaults=defaults)
    with pytest.raises(AssertionError):
        check(model, ask, answer, defaults={"paper": "measured", "measured": "paper"}[defaults])
