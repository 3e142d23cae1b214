"""On a GPU: engines as users have them, with CUDA graphs, by both of vLLM's runners."""

from itertools import takewhile

import pytest
import torch

from tests.engine.served import test_answers_anywhere as anywhere
from tests.engine.served.test_masked_model import check
from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Answer, Ask, engine, evicting_engine, run

CLOSE = {"atol": 0.15, "rtol": 0.05}
"""Of bf16 in two implementations; logits of these models reach about 3."""
ASKS = [
    Ask(300, "ada-snapkv", 0.2, max_tokens=40),
    Ask(500, "snapkv", 0.3, max_tokens=70, seed=1),
    Ask(410, "lava", 0.3, max_tokens=30, seed=2),
    Ask(333, "kvzip", 0.4, max_tokens=20, seed=3),
    Ask(350, "h2o", 0.4, max_tokens=25, seed=4),
    Ask(280, "streaming-llm", 0.4, max_tokens=33, seed=5),
    Ask(250, "ada-snapkv", 0.3, prefix_len=200, max_tokens=50, seed=6),
    Ask(120, "full", max_tokens=60, seed=7),
    Ask(1500, "ada-snapkv", 0.1, max_tokens=40, seed=8),
]
SETTINGS = {"dtype": "bfloat16", "enforce_eager": False, "max_num_seqs": 8}
EXACT = {"dtype": "float32", "enforce_eager": False, "max_num_seqs": 16, "max_model_len": 512}


@pytest.fixture(params=["0", "1"], ids=["V1 runner", "V2 runner"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of vLLM's runners serves."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    return request.param


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton multiplies fp32 numbers as TF32 otherwise."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")


@pytest.fixture
def model(models):
    return models("llama", heads=8, kv_heads=2, head_dim=64)


@pytest.mark.engine
def test_answers(model, runner: str) -> None:
    with evicting_engine(model, **SETTINGS) as llm:
        # Twice, so that pages and slots are used again.
        for answers in (run(llm, ASKS, logits=True), run(llm, ASKS, logits=True)):
            check(model, ASKS, answers, torch.bfloat16, **CLOSE)
    # The control: had nothing been evicted, the answer would be another.
    unevicted = masked_logits(model, ASKS[0].prompt, answers[0].tokens, dtype=torch.bfloat16)
    assert not torch.allclose(answers[0].logits, unevicted, **CLOSE)


@pytest.mark.engine
def test_nothing_evicted_is_stock(model, runner: str) -> None:
    whole = [Ask(ask.length, "ada-snapkv", 1.0, max_tokens=ask.max_tokens, seed=ask.seed) for ask in ASKS]
    with engine(model, **SETTINGS) as llm:
        expected = run(llm, whole, logits=True, recorded=False)
    with evicting_engine(model, **SETTINGS) as llm:
        answers = run(llm, whole, logits=True)
    for answer, stock in zip(answers, expected, strict=True):
        same = compared(answer, stock)
        torch.testing.assert_close(answer.logits[:same], stock.logits[:same], **CLOSE)


def compared(answer: Answer, stock: Answer) -> int:
    """Tokens up to the first that differs, which two equally likely ones may."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(answer.tokens, stock.tokens, strict=True))
    return min(len(answer.tokens), 1 + sum(1 for _ in equal))


@pytest.mark.engine
def test_parts_and_answers_that_are_evicted(models, runner: str) -> None:
    model = models("llama", heads=8, kv_heads=4, layers=4)
    with evicting_engine(model, eviction=anywhere.OPTIONS, **EXACT) as llm:
        answers = run(llm, anywhere.ASKS, logits=True)
    anywhere.RULES.check(model, anywhere.ASKS, answers, anywhere.PROMPT_POSITIONS)


@pytest.mark.engine
def test_a_model_of_which_some_layers_have_a_state(models, runner: str) -> None:
    model = models("granitemoehybrid")
    asks = [Ask(300, "ada-snapkv", 0.3), Ask(200, "snapkv", 0.4, seed=1), Ask(120, "full")]
    with evicting_engine(model, **EXACT) as llm:
        answers = run(llm, asks, logits=True)
    check(model, asks, answers, atol=1e-3, rtol=1e-3)
