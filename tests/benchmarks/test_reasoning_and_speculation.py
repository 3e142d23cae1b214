"""Scenarios of throughput whose answers are evicted or drafted: sides, figures and targets; no server is started."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import reasoning, scenarios, speculation
from benchmarks.harness.load import PAGE
from benchmarks.harness.scenarios import BLOCK, STOCK, token_bytes
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from benchmarks.harness.speculation import NGRAM, copying_model, with_ngram
from tests.benchmarks.runs import ours, run_of, without_port

LONG, FITS = reasoning.SCENARIOS["reasoning-long"], reasoning.SCENARIOS["reasoning-fits"]
COPY = speculation.SCENARIOS["speculation-copy"]


def commands(monkeypatch, module, scenario, path) -> list[list[str]]:
    """Of all sides, without their ports."""
    monkeypatch.setattr(module, "model", lambda max_len: path)
    return [without_port(scenario.server(side, threads=1).command) for side in scenario.sides]


# Answers that are evicted.


def long_rounds(scenario, wall: float, seconds: float = 0.0, **changes) -> list[dict]:
    """Three rounds in which stock vLLM takes 10 s."""
    run = replace(ours(wall, **changes), decision_seconds=seconds)
    return [{STOCK: run_of(10.0), scenario.policy: run}] * 3


def test_sides_with_long_answers_differ_in_the_eviction_only(monkeypatch, tmp_path):
    stock, evicting = commands(monkeypatch, scenarios, replace(LONG, policy="snapkv"), tmp_path)
    assert evicting == [
        *stock,
        *("--kv-eviction", "ada-snapkv", "--kv-budget", "1", "--kv-decode-budget", "448"),
        *("--kv-eviction-config.decode_interval", "128", "--kv-eviction-config.decode_policy", "snapkv"),
    ]


def test_twelve_bounded_requests_fit_the_memory_of_three_whole_ones():
    pages = LONG.kv_bytes() // token_bytes(LONG.dtype) // PAGE
    bounded = LONG.input_len + LONG.decode_budget + LONG.decode_interval
    # Heads that compete end anywhere in a page: one page more in each row.
    assert (pages - BLOCK // PAGE) // (bounded // PAGE + 1) == reasoning.AT_ONCE
    assert FITS.output_len == FITS.decode_budget + FITS.decode_interval and not FITS.evicts and LONG.evicts


@pytest.mark.parametrize("level, dtype, bound", [("avx512", "bfloat16", 2.4), ("avx2", "float32", 2.0)])
def test_targets_of_long_answers(at_level, level, dtype, bound):
    at_level(level)
    scenario = replace(LONG, dtype=dtype)
    met = scenario.targets("reasoning-long", long_rounds(scenario, 10 / bound, seconds=0.1, peak=12))
    assert [target.bound for target in met] == [bound, 12, 0, 0.08] and all(target.met for target in met)
    rounds = long_rounds(scenario, 6.0, seconds=1.0, peak=11, preemptions=1)
    assert not any(target.met for target in scenario.targets("reasoning-long", rounds))
    assert replace(LONG, policy="snapkv").targets("reasoning-long", rounds) == []
    for wall, verdict in ((10.2, True), (10.5, False)):
        (target,) = FITS.targets("reasoning-fits", long_rounds(FITS, wall))
        assert target.met == verdict


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


def test_the_model_names_each_tokens_successor(tmp_path, monkeypatch):
    torch.manual_seed(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file({name: torch.randn(VOCAB, 64) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(speculation, "model", lambda max_len: tmp_path)
    monkeypatch.setattr(speculation, "SCRATCH", tmp_path)
    weights = load_file(copying_model(64) / "model.safetensors")
    logits = weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T
    words = range(FIRST_WORD, VOCAB)
    assert [int(logits[token].argmax()) for token in words] == [successor(token) for token in words]


def test_sides_differ_in_eviction_and_drafts_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(speculation, "copying_model", lambda max_len: tmp_path)
    flags = dict(zip(COPY.sides, commands(monkeypatch, scenarios, COPY, tmp_path), strict=True))
    drafting = ["--speculative-config", json.dumps(NGRAM)]
    plain = flags[with_ngram(STOCK)][:-2]
    assert flags[with_ngram(STOCK)] == plain + drafting and len(flags) == 5
    for name, budget in (("budget 1", "1"), ("budget 0.2", "0.2")):
        evicting = ["--kv-eviction", "ada-snapkv", "--kv-budget", budget]
        assert flags[name] == plain + evicting and flags[with_ngram(name)] == plain + drafting + evicting
    assert COPY.environment(None)["NUMBA_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "drafting, verdict", [(101.0, [True, True]), (99.0, [False, True]), (59.0, [False, False])]
)
def test_verdict_on_drafts(drafting, verdict):
    speeds = dict(zip(COPY.sides, (100.0, 90.0, 100.0, 60.0, drafting), strict=True))
    rounds = [{side: run_of(100 / speed) for side, speed in speeds.items()}] * 3
    assert [target.met for target in COPY.targets("speculation-copy", rounds)] == [True, True, *verdict]
