"""The GPU benchmarks on a CPU: kernels in Triton's interpreter, FlashAttention as plain torch, a timer of the host."""

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu import attention, common, eviction, kernels
from benchmarks.gpu.common import WrongResult
from benchmarks.micro import loop
from tests.interpreting import interpreted
from vllm_kvevict.kernels import compact_rows

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name
CARD = {"name": "none", "memory_GiB": 1.0}


class HostTimer:
    """Runs the work; the time is the host's."""

    was_late = True

    def __call__(self, work: Any, ahead_ms: float) -> float:
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)


class PlainAttention(common.FlashAttention):
    """FlashAttention as plain torch."""

    def __init__(self) -> None:
        self.version = 0

    def _attend(self, *, q, k, v, out, block_table, softcap, **rest) -> None:
        assert not softcap and rest["scheduler_metadata"] is None and rest["causal"]
        assert q.dtype == k.dtype == v.dtype == common.DTYPE
        lengths, starts = rest["seqused_k"], rest["cu_seqlens_q"]
        assert all(t.dtype == torch.int32 for t in (lengths, starts, block_table))
        for i, length in enumerate(lengths.tolist()):
            rows = slice(*starts[i : i + 2].tolist())
            count = rows.stop - rows.start
            assert length <= rest["max_seqlen_k"] and count <= rest["max_seqlen_q"]
            pages = block_table[i, : -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k, v))
            queries, seen = q[rows].transpose(0, 1).float(), torch.ones(count, length, dtype=torch.bool)
            mask = {"attn_mask": seen.tril(length - count), "scale": rest["softmax_scale"]}
            found = scaled_dot_product_attention(queries, keys, values, **mask, enable_gqa=True)
            out[rows] = found.transpose(0, 1).to(out.dtype)


@pytest.fixture
def card(monkeypatch):
    """A card that this machine pretends to have."""
    for name, value in {
        "DEVICE": torch.device("cpu"),
        "COPY_BYTES": 1 << 12,
        "WARM_UP": 0,
        "Timer": HostTimer,
        "FlashAttention": PlainAttention,
        "free_bytes": lambda: 1 << 40,
        "multiprocessors": lambda: 4,
        "card": lambda: CARD,
    }.items():
        monkeypatch.setattr(common, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(SELECT, "on_gpu", lambda tensor: True)
    with interpreted():
        yield


@pytest.fixture
def run(card, monkeypatch, capsys):
    """Runs a benchmark; its results as recorded."""

    def measure(module: Any, words: str, rounds: int = 1) -> dict:
        saved: dict[str, Any] = {}
        monkeypatch.setattr(loop, "save", lambda name, content: saved.update({name: content}))
        name = module.__name__.removeprefix("benchmarks.gpu.")
        assert loop.run(f"gpu/{name}", module, [*words.split(), "--rounds", str(rounds)]) == 0
        record = saved[f"gpu/{name}"]
        assert record["card"] == CARD and record["command"].startswith(f"python -m benchmarks.gpu.{name}")
        assert record["results"]["settings"]["rounds"] == rounds
        printed = capsys.readouterr().out
        assert "the host was late in" in printed and "target" in printed
        return record["results"]

    return measure


@pytest.mark.parametrize("module", [attention, kernels, eviction])
def test_without_a_device_there_is_one_line(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        loop.run("gpu/none", module, [])


@pytest.mark.parametrize("tolerance", [0, 1e-2])
def test_wrong_results_are_not_timed(tolerance):
    right = torch.ones(4)
    common.check("right", right, right.clone(), tolerance)
    for wrong in (torch.tensor([1, 1, 1, 2.0]), torch.tensor([1, 1, 1, torch.nan])):
        with pytest.raises(WrongResult, match="wrong"):
            common.check("wrong", wrong, right, tolerance)


def test_attention(run, capsys):
    results = run(attention, "--contexts 64 --budgets 1 0.2 --batches 2")
    cells = results["cells"]
    assert [(cell["batch"], cell["kept"]) for cell in cells] == [(2, 64), (2, 13)]
    assert [len(cell["sides"]) for cell in cells] == [3, 4]
    sides = cells[1]["sides"]
    us = [sides[name]["us"]["median"] for name in (attention.FULL, attention.OURS, attention.RAGGED)]
    assert sides[attention.OURS]["over_full"]["median"] == pytest.approx(us[0] / us[1])
    assert cells[1]["ragged_over_uniform"]["median"] == pytest.approx(us[2] / us[1])
    assert [target["bound"] for target in results["targets"]] == [4.5, 1.05]


def test_attention_refuses_a_wrong_kernel(run, monkeypatch):
    class Wrong(attention.PagedDecode):
        def __call__(self, query, *others):
            super().__call__(query * 2, *others)

    monkeypatch.setattr(attention, "PagedDecode", Wrong)
    with pytest.raises(WrongResult, match="PagedDecode"):
        run(attention, "--contexts 64 --budgets 0.5 --batches 1")


def test_kernels(run):
    results = run(kernels, "--context 192 --layers 1 --append-batch 3 --decode-batch 1", rounds=2)
    found = {one["name"]: one for one in results["kernels"]}
    assert len(found) == 13 and len(results["targets"]) == 11
    entries = 192 * 8 * 512
    assert found["write_entries, one layer"]["bytes"] == 2 * entries + 192 * 8 * 8
    assert found["cuts, all layers, head by head"]["bytes"] == 3 * 160 * 8 * 8
    one = found["paged_decode, 1 requests, one layer"]
    floor = one["bytes"] / (results["bandwidth_GB_per_s"] * 1e9)
    assert one["times_floor"]["median"] == pytest.approx(one["us"]["median"] * 1e-6 / floor)


def test_kernels_refuse_a_wrong_compaction(card, monkeypatch):
    monkeypatch.setattr(compact_rows, "compact_rows", lambda *arguments: None)
    with pytest.raises(WrongResult, match="compact_rows"):
        kernels.compactions(192, 1)


@pytest.fixture
def small_model(monkeypatch):
    """Heads and matrix products of a size for a CPU."""
    for module in (common, eviction):
        monkeypatch.setattr(module, "QUERY_HEADS", 8)
        monkeypatch.setattr(module, "KV_HEADS", 2)
    monkeypatch.setattr(eviction, "MATRICES", {name: (32, 64) for name in eviction.MATRICES})
    monkeypatch.setattr(eviction, "TARGET_LENGTH", 96)


def test_eviction(small_model, run):
    results = run(eviction, "--lengths 96 --layers 2 --policies snapkv lava")
    (length,) = results["lengths"]
    assert set(length["policies"]) == {"snapkv", "lava"} and len(results["targets"]) == 2
    raw = length["raw"]
    assert (raw["down"]["late"], raw["lava"]["late"]) == (1, 0)  # who waits for the device is never late
    prefill = 2 * sum(raw[part]["ms"][0] for part in (eviction.ATTENTION, *eviction.MATRICES))
    assert length["policies"]["lava"]["of_prefill"]["median"] == pytest.approx(raw["lava"]["ms"][0] / prefill)


@pytest.mark.parametrize("policy", ["h2o", "criticalkv", "take"])
def test_eviction_names_policies_that_it_cannot_serve(policy):
    assert policy in eviction.refuse(SimpleNamespace(policies=[policy], budget=0.2))
