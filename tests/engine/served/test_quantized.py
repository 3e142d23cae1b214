"""Quantized weights: eviction reads keys and queries, which stay in the model's own dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.kernels.linear.scaled_mm import cpu

from benchmarks.harness.models import make_variant
from tests.engine.support.masked import masked_logits
from tests.engine.support.refused import QUANTIZED
from tests.engine.support.running import Answer, Ask, engine, evicting_engine, run
from vllm_kvevict.policies import EvictionConfig


def _quantize(folder: Path, model: Path) -> tuple[Path, Path]:
    """Write the model with weights and activations of 8 bits, and a plain one with the same rounded weights."""
    weights = load_file(model / "model.safetensors")
    rounded, quantized = dict(weights), dict(weights)
    for name, weight in weights.items():
        if "layers" not in name or not name.endswith("_proj.weight"):
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        quantized[name] = (weight / scale).round().to(torch.int8)
        quantized[f"{name}_scale"] = scale
        rounded[name] = quantized[name] * scale
    return (
        make_variant(folder / "quantized", model, quantized, quantization_config=QUANTIZED),
        make_variant(folder / "rounded", model, rounded),
    )


@pytest.mark.engine
def test_weights_and_activations_of_8_bits(models, tmp_path, monkeypatch):
    # With AMX, vLLM takes a kernel for such weights that knows no float32, with eviction and without.
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: False)
    # One layer: rounded activations change what further layers see by more than evictions do.
    quantized, rounded = _quantize(tmp_path, models("llama", layers=1))
    lengths = (300, 31, 500, 64)
    with engine(quantized) as llm:
        stock = [answer.tokens for answer in run(llm, [Ask(n) for n in lengths], recorded=False)]
    with evicting_engine(quantized) as llm:
        full = run(llm, [Ask(n) for n in lengths], logits=True)
        whole = run(llm, [Ask(n, "ada-snapkv", 1.0) for n in lengths])
        (evicted,) = run(llm, [Ask(300, "ada-snapkv", 0.3)], logits=True)
    assert [answer.tokens for answer in full] == [answer.tokens for answer in whole]
    # An activation in the middle between two rounded ones falls to either side, as its last bits say: on some
    # processors one of these prompts has such a one.
    same = [answer.tokens == tokens for answer, tokens in zip(full, stock, strict=True)]
    assert sum(same) >= len(lengths) - 1
    budget = EvictionConfig("ada-snapkv", keep_ratio=0.3).budget_for(300)
    assert sum(map(len, evicted.kept[0][0])) == 2 * budget
    # The plain model does not round activations, so that its logits are a little different.
    noise = _distance(rounded, full[0], {})
    assert _distance(rounded, evicted, evicted.kept[0]) < 1.5 * noise
    assert _distance(rounded, evicted, {}) > 4 * noise


def _distance(model: Path, answer: Answer, kept: dict[int, list[list[int]]]) -> float:
    """How far an answer's logits are from those of the plain model, as the root of the mean square."""
    expected = masked_logits(model, Ask(300).prompt, answer.tokens, [(300, kept)])
    return (answer.logits - expected).pow(2).mean().sqrt().item()
