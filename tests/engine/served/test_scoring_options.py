"""How a policy combines attention, as a server's parameters say: of rows, of query heads, of neighbours."""

import pytest

from tests.engine.served.test_decisions import check_evicted
from tests.engine.served.test_kvzip import LAYOUTS, SERVER
from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

BEST = {"rows": "max", "gqa": "max", "pooling": "decay"}


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
        check_evicted(model, ask, answer, RepeatPrompts(), **BEST)
        for name, other in (("rows", "mean"), ("gqa", "mean"), ("pooling", "max")):
            with pytest.raises(AssertionError):
                check_evicted(model, ask, answer, RepeatPrompts(), **{**BEST, name: other})
