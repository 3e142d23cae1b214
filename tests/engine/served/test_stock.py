"""Nothing evicted: greedy tokens equal those of vLLM without the flag."""

import json

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness.models import make_variant
from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Ask, engine, evicting_engine, num_preemptions, run

LENGTHS = (300, 31, 500, 700, 33, 64)
TOKENS = 64


def _asks(policy="full", budget=None):
    return [Ask(length, policy, budget, max_tokens=TOKENS) for length in LENGTHS]


def _tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


@pytest.fixture(scope="module")
def stock(model):
    with engine(model) as llm:
        return _tokens(run(llm, _asks(), recorded=False))


@pytest.mark.engine
def test_budget_one_and_full(model, stock):
    with evicting_engine(model) as llm:
        assert _tokens(run(llm, _asks())) == stock
        assert _tokens(run(llm, _asks("ada-snapkv", 1.0))) == stock
        # A budget that no prompt exceeds keeps everything, too; a small one does not.
        assert _tokens(run(llm, _asks("snapkv", 700.0))) == stock
        assert _tokens(run(llm, _asks("ada-snapkv", 0.2))) != stock


@pytest.mark.engine
def test_an_engine_without_the_flag_in_the_same_process(model, stock):
    with evicting_engine(model, eviction={"policy": "snapkv", "budget": 0.2}) as llm:
        run(llm, _asks("snapkv", 0.2))
    with engine(model) as plain:
        assert _tokens(run(plain, _asks(), recorded=False)) == stock


@pytest.mark.engine
def test_a_checkpoint_that_asks_for_fp8_kv_with_its_own_dtype_in_the_flag(models):
    """As the refusal of such checkpoints advises: then vLLM leaves its scheme alone."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    asks = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    plain = models("llama", dtype=torch.bfloat16)
    quantized = models("llama", dtype=torch.bfloat16, quantization_config=asks)
    # Which kernel is faster is timed at each start, and in bfloat16 they round otherwise.
    kernels = {"kernels": False}
    with evicting_engine(plain, dtype="bfloat16", eviction=kernels) as llm:
        expected = _tokens(run(llm, _asks("snapkv", 0.2)))
    with evicting_engine(quantized, dtype="bfloat16", kv_cache_dtype="bfloat16", eviction=kernels) as llm:
        assert _tokens(run(llm, _asks("snapkv", 0.2))) == expected


@pytest.mark.engine
def test_the_text_of_a_multimodal_model(models, tmp_path):
    text = models("qwen2")
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
    }
    weights = load_file(text / "model.safetensors")
    model = make_variant(
        tmp_path,
        text,
        {f"language_model.{name}": weight for name, weight in weights.items()},
        architectures=["Qwen2AudioForConditionalGeneration"],
        model_type="qwen2_audio",
        text_config=json.loads((text / "config.json").read_text()),
        audio_config=audio,
    )
    settings = {"language_model_only": True, "skip_tokenizer_init": True}
    with engine(model, **settings) as llm:
        stock = _tokens(run(llm, _asks(), recorded=False))
    evicted = Ask(300, "ada-snapkv", 0.3)
    with evicting_engine(model, **settings) as llm:
        assert _tokens(run(llm, _asks())) == stock
        assert _tokens(run(llm, _asks("ada-snapkv", 1.0))) == stock
        (answer,) = run(llm, [evicted], logits=True)
    expected = masked_logits(text, evicted.prompt, answer.tokens, answer.kept[0], evicted.length)
    torch.testing.assert_close(answer.logits, expected, atol=1e-4, rtol=1e-4)
    unmasked = masked_logits(text, evicted.prompt, answer.tokens, {}, evicted.length)
    assert not torch.allclose(answer.logits, unmasked, atol=1e-2)


@pytest.mark.engine
def test_preempted_and_chunked(model, stock):
    blocks = 2048 // 128 + 1
    settings = {"num_gpu_blocks_override": blocks, "max_num_seqs": 16, "max_num_batched_tokens": 96}
    with evicting_engine(model, **settings, eviction={"decode_reserve": 1, "min_prompt": 256}) as llm:
        # As many requests again crowd the pool until somebody is thrown out.
        crowd = [Ask(400, max_tokens=200, seed=seed) for seed in range(1, 5)]
        answers = run(llm, [*_asks(), *crowd])
        assert num_preemptions(llm) > 0
    assert _tokens(answers[: len(LENGTHS)]) == stock


@pytest.mark.engine
def test_compiled(model, stock):
    with evicting_engine(model, enforce_eager=False) as llm:
        assert _tokens(run(llm, _asks())) == stock
        assert _tokens(run(llm, _asks("snapkv", 1.0))) == stock
