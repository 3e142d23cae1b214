"""The load, the model and the verdict of the benchmark of speculative decoding; no server is started."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from benchmarks import speculation
from benchmarks.harness.scenarios import STOCK
from benchmarks.harness.server import Snapshot
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from benchmarks.speculation import (
    NGRAM,
    SCENARIOS,
    Drafting,
    copying_model,
    figures,
    make_server,
    parse_arguments,
    summary,
    with_ngram,
)
from tests.benchmarks.runs import run_of

COPY = SCENARIOS["copy"]


def successor(token: int) -> int:
    return FIRST_WORD + (token - FIRST_WORD + 1) % (VOCAB - FIRST_WORD)


def test_prompts_count_and_miscount_now_and_then():
    load = COPY.load(1)
    assert load.prompts() == COPY.load(1).prompts() != COPY.load(2).prompts()
    for prompt, answer in load.prompts():
        assert (len(prompt), answer) == (COPY.input_len, COPY.output_len)
        breaks = sum(successor(a) != b for a, b in itertools.pairwise(prompt))
        # A mistake breaks twice: where it begins and where it ends.
        assert COPY.input_len / COPY.every < breaks < 3 * COPY.input_len / COPY.every
        assert min(prompt) >= FIRST_WORD and max(prompt) < VOCAB


def test_the_model_names_each_tokens_successor(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_file(
        {name: torch.randn(VOCAB, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(speculation, "model", lambda max_len: tmp_path)
    monkeypatch.setattr(speculation, "SCRATCH", tmp_path)
    weights = load_file(copying_model(64) / "model.safetensors")
    logits = weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T
    words = range(FIRST_WORD, VOCAB)
    assert [int(logits[token].argmax()) for token in words] == [successor(token) for token in words]


def test_sides_differ_in_eviction_and_drafts_alone():
    flags, drafting = {}, ["--speculative-config", json.dumps(NGRAM)]
    for side in COPY.sides:
        flags[side] = make_server(Path("m"), COPY, side, 1).command
        port = flags[side].index("--port") + 1
        flags[side][port] = ""
    stock = flags[with_ngram(STOCK)]
    assert stock[-2:] == drafting
    for name, budget in (("budget 1", "1"), ("budget 0.2", "0.2")):
        evicting = ["--kv-eviction", "ada-snapkv", "--kv-budget", budget]
        assert flags[name] == stock[:-2] + evicting
        assert flags[with_ngram(name)] == stock + evicting


def rounds_of(**speeds: float) -> list[speculation.Round]:
    """Three rounds, by the sides' tokens per second."""
    names = dict(zip(("stock", "one", "one_drafting", "fifth", "fifth_drafting"), COPY.sides, strict=True))
    return [{side: Drafting(run_of(100 / speeds[key]), 90, 80) for key, side in names.items()}] * 3


@pytest.mark.parametrize(
    "drafting, verdict",
    [(101.0, [True, True]), (99.0, [False, True]), (59.0, [False, False])],
)
def test_verdict(drafting, verdict):
    rounds = rounds_of(stock=100.0, one=90.0, one_drafting=100.0, fifth=60.0, fifth_drafting=drafting)
    assert [target.met for target in figures(COPY, rounds)] == [True, True, *verdict]


def test_targets_hold_for_the_scenarios_own_sizes():
    rounds = rounds_of(stock=1.0, one=1.0, one_drafting=1.0, fifth=1.0, fifth_drafting=1.0)
    console = Console(file=io.StringIO(), width=130)
    assert len(summary("copy", COPY, rounds, console)["targets"]) == 4
    assert "accepted" in console.file.getvalue()
    for scenario, few in ((replace(COPY, every=9), rounds), (COPY, rounds[:2])):
        assert summary("copy", scenario, few, console)["targets"] == []


def test_command_line():
    _, scenarios = parse_arguments(["--rounds", "1", "--output-len", "64", "--dtype", "float32"])
    assert scenarios == {"copy": replace(COPY, rounds=1, output_len=64, dtype="float32")}
    with pytest.raises(SystemExit):
        parse_arguments(["nothing"])


def test_drafts_are_read_from_the_metrics():
    text = "vllm:spec_decode_num_draft_tokens_total 9.0\nvllm:spec_decode_num_accepted_tokens_total 7.0\n"
    snapshot = Snapshot.parse(text)
    assert (snapshot.draft_tokens, snapshot.accepted_drafts) == (9, 7)
