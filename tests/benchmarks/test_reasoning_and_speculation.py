"""Scenarios of throughput whose answers are evicted or drafted, or entries quantised; no server is started."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import quantised, reasoning, scenarios, speculation
from benchmarks.harness.load import INT8, entry_bytes
from benchmarks.harness.scenarios import SPEED, STOCK
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from benchmarks.harness.speculation import NGRAM, copying_drafter, copying_model
from tests.benchmarks.runs import run_of, without_port

SENT = ("bfloat16", "bfloat16", "bfloat16", INT8)
LONG, FITS = reasoning.SCENARIOS["reasoning-long"], reasoning.SCENARIOS["reasoning-fits"]
COPY, DRAFTED = (speculation.SCENARIOS[f"speculation-{name}"] for name in ("copy", "draft-model"))


def commands(monkeypatch, module, scenario, path) -> list[list[str]]:
    """Of all sides, without their ports."""
    monkeypatch.setattr(module, "model", lambda *_, **sizes: path)
    return [without_port(scenario.server(side, threads=1).command) for side in scenario.sides]


# Answers that are evicted.


def test_sides_with_long_answers_differ_in_the_eviction_only(monkeypatch, tmp_path):
    stock, evicting = commands(monkeypatch, scenarios, replace(LONG, policy="snapkv"), tmp_path)
    assert evicting == [
        *stock,
        *("--kv-eviction", "ada-snapkv", "--kv-budget", "1", "--kv-decode-budget", "448"),
        *("--kv-eviction-config.decode_interval", "128", "--kv-eviction-config.decode_policy", "snapkv"),
    ]


# Entries in 8 bits.

EIGHT = quantised.SCENARIOS["quantised"]


def test_sides_with_eviction_differ_in_dtype_or_memory(monkeypatch, tmp_path, at_level):
    at_level("avx2")
    stock, own, twice, eight = commands(monkeypatch, scenarios, EIGHT, tmp_path)
    assert own == [*stock, "--kv-eviction", "ada-snapkv", "--kv-budget", "0.2"]
    assert eight == [*own, "--kv-cache-dtype", INT8]
    memory, more = (str(replace(EIGHT, pool=pool).kv_bytes()) for pool in (2, 4))
    assert own.count(memory) == 1 and twice == [more if word == memory else word for word in own]
    at_level("avx512")
    assert EIGHT.flags(STOCK) == ["--kv-cache-dtype", "fp8"]

    async def drive(*sent):
        return sent[2:]

    monkeypatch.setattr(quantised, "drive", drive)
    sent = [asyncio.run(EIGHT.send(None, side, 1)) for side in EIGHT.sides]
    assert sent == [(int(of), dtype) for of, dtype in zip((memory, memory, more, memory), SENT, strict=True)]


@pytest.mark.parametrize("dtype, entry", [("bfloat16", 256), ("float32", 512)])
def test_so_many_requests_fit_in_8_bits_by_their_sizes(dtype, entry):
    tokens = replace(EIGHT, dtype=dtype).kv_bytes() // (32 * entry_bytes(INT8))
    assert tokens == (2 * 2304 + 128) * entry // 136
    fit = (tokens - 2048) / (410 + 256)
    assert fit - 1 < quantised.AT_ONCE[dtype] < fit + 1


def test_8_bits_are_held_against_twice_the_memory():
    walls = dict(zip(EIGHT.sides, (4.0, 2.0, 1.0, 1.25), strict=True))
    reached = EIGHT.ratios([{side: run_of(wall) for side, wall in walls.items()}] * 3)
    assert [one[SPEED].median for one in reached.values()] == [2.0, 4.0, 3.2]
    assert [one.median for one in reached[quantised.EIGHT_BITS].values()] == [3.2, 1.6, 0.8]


# Answers that are drafted.


def successor(token: int) -> int:
    return FIRST_WORD + (token - FIRST_WORD + 1) % (VOCAB - FIRST_WORD)


def test_prompts_count_and_miscount_now_and_then():
    loads = [COPY.load(seed) for seed in (1, 1, 2)]
    assert loads[0].prompts() == loads[1].prompts() != loads[2].prompts()
    for prompt, answer in loads[0].prompts():
        assert (len(prompt), answer) == (COPY.input_len, COPY.output_len)
        breaks = sum(successor(a) != b for a, b in itertools.pairwise(prompt))
        # A mistake breaks twice: where it begins and where it ends.
        assert COPY.input_len / COPY.every < breaks < 3 * COPY.input_len / COPY.every
        assert min(prompt) >= FIRST_WORD and max(prompt) < VOCAB


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A stand-in for the random model, with two layers."""
    torch.manual_seed(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: torch.randn(VOCAB, 64) for name in names}
    layers = {f"model.layers.{layer}.mlp.weight": torch.full((1,), float(layer)) for layer in range(2)}
    save_file(weights | layers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    monkeypatch.setattr(speculation, "model", lambda max_len: tmp_path)
    monkeypatch.setattr(speculation, "SCRATCH", tmp_path)


@pytest.mark.parametrize("make", [copying_model, copying_drafter])
def test_the_model_and_its_drafter_name_each_tokens_successor(base, make):
    path = make(64)
    weights = load_file(path / "model.safetensors")
    logits = weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T
    words = range(FIRST_WORD, VOCAB)
    assert [int(logits[token].argmax()) for token in words] == [successor(token) for token in words]
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    assert layers == (1 if make is copying_drafter else 2)
    assert {name for name in weights if ".layers." in name} == {
        f"model.layers.{layer}.mlp.weight" for layer in range(layers)
    }


@pytest.mark.parametrize("scenario", [COPY, DRAFTED], ids=lambda scenario: scenario.method)
def test_sides_differ_in_eviction_and_drafts_alone(monkeypatch, tmp_path, scenario):
    for name in ("copying_model", "copying_drafter"):
        monkeypatch.setattr(speculation, name, lambda max_len, name=name: tmp_path / name)
    flags = dict(zip(scenario.sides, commands(monkeypatch, scenarios, scenario, tmp_path), strict=True))
    model = {"method": "draft_model", "model": str(tmp_path / "copying_drafter"), "num_speculative_tokens": 3}
    drafting = ["--speculative-config", json.dumps(NGRAM if scenario is COPY else model)]
    stock = scenario.drafted(STOCK)
    plain = flags[stock][:-2]
    assert flags[stock] == plain + drafting and len(flags) == 5
    for name, budget in (("budget 1", "1"), ("budget 0.2", "0.2")):
        evicting = ["--kv-eviction", "ada-snapkv", "--kv-budget", budget]
        assert flags[name] == plain + evicting
        assert flags[scenario.drafted(name)] == plain + drafting + evicting
    assert scenario.environment(None)["NUMBA_NUM_THREADS"] == "1"
