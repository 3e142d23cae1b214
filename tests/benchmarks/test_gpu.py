"""The GPU benchmarks on a CPU: kernels in Triton's interpreter, FlashAttention as plain torch, a timer of the host."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, common, eviction, kernels
from benchmarks.gpu.common import Contender, WrongResult
from tests.interpreting import interpreted
from vllm_kvevict.kernels import compact_rows

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name
CARD = {"name": "none", "memory_GiB": 1.0, "multiprocessors": 4, "driver": "0"}


class HostTimer:
    """Runs the work; the time is the host's."""

    was_late = False

    def __call__(self, work: Any, ahead_ms: float) -> float:
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)


class PlainAttention:
    """FlashAttention's arguments and result."""

    version = 0

    def plan(self, *sizes: Any) -> None:
        return None

    def __call__(
        self,
        *,
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        block_table,
        softcap,
        **rest,
    ) -> None:
        assert not softcap and rest.get("scheduler_metadata") is None
        assert q.dtype == k.dtype == v.dtype == common.DTYPE
        starts, group = cu_seqlens_q.tolist(), q.shape[1] // k.shape[2]
        assert all(t.dtype == torch.int32 for t in (cu_seqlens_q, seqused_k, block_table))
        for i, length in enumerate(seqused_k.tolist()):
            rows = slice(starts[i], starts[i + 1])
            count = rows.stop - rows.start
            assert length <= max_seqlen_k and count <= max_seqlen_q
            pages = block_table[i, : -(-length // k.shape[1])].long()
            keys, values = (
                x[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).float() for x in (k, v)
            )
            logits = torch.einsum("qhd,nhd->hqn", q[rows].float(), keys) * q.shape[2] ** -0.5
            hidden = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
            weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqn,nhd->qhd", weights, values).to(out.dtype)


@pytest.fixture
def card(monkeypatch):
    """A card that this machine pretends to have."""
    for name, value in {
        "DEVICE": torch.device("cpu"),
        "COPY_BYTES": 1 << 12,
        "WARM_UP": 0,
        "Timer": HostTimer,
        "FlashAttention": PlainAttention,
        "require_cuda": lambda: None,
        "free_bytes": lambda: 1 << 40,
        "multiprocessors": lambda: 4,
        "card": lambda: CARD,
    }.items():
        monkeypatch.setattr(common, name, value)
    monkeypatch.setattr(SELECT, "on_gpu", lambda tensor: True)
    with interpreted():
        yield


def run(module: Any, out: Path, capsys, arguments: str, rounds: int = 2) -> tuple[dict, str]:
    """The record and what was printed."""
    module.main([*arguments.split(), "--out", str(out / "result.json"), "--rounds", str(rounds)])
    return json.loads((out / "result.json").read_text()), capsys.readouterr().out


def check_record(record: dict, out: str, title: str) -> None:
    assert record["card"] == CARD and record["command"].startswith("python -m benchmarks.gpu.")
    assert record["versions"]["torch"] == torch.__version__ and record["settings"]["rounds"]
    assert out.index("target") < out.index("written to") < out.index(title)


@pytest.mark.parametrize("name", ["attention", "kernels", "eviction"])
def test_without_a_device_there_is_one_line(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device") as raised:
        importlib.import_module(f"benchmarks.gpu.{name}").main([])
    assert "\n" not in str(raised.value)


def test_contenders_take_turns_after_a_warm_up():
    calls: list[str] = []
    contenders = [
        Contender("a", lambda: calls.append("a"), lambda: calls.append("before a")),
        Contender("b", lambda: calls.append("b"), waits=True),
    ]

    class LateTimer(HostTimer):
        was_late = True

    times = common.take_turns(contenders, 2, LateTimer())
    assert calls[-5:] == ["a", "b", "b", "before a", "a"]
    assert calls.count("b") == common.WARM_UP + 2 and [len(one.ms) for one in times.values()] == [2, 2]
    assert [one.late for one in times.values()] == [2, 0]  # who waits for the device is never called late


@pytest.mark.parametrize("tolerance", [0, 1e-2])
def test_wrong_results_are_not_timed(tolerance):
    right = torch.ones(4)
    common.check("right", right, right.clone(), tolerance)
    for wrong in (torch.tensor([1, 1, 1, 2.0]), torch.tensor([1, 1, 1, torch.nan])):
        with pytest.raises(WrongResult, match="wrong"):
            common.check("wrong", wrong, right, tolerance)


@pytest.mark.parametrize("kept", [1, 13, 60, 100])
def test_ragged_heads_hold_as_much_as_uniform_ones(kept):
    lengths = attention.ragged_lengths(5, kept, 100, seed=0)
    assert (lengths.sum(1) == kept * common.KV_HEADS).all() and lengths.min() >= 1 and lengths.max() <= 100
    assert kept in (1, 100) or (lengths != kept).any(1).all()


def test_attention(card, tmp_path, capsys):
    arguments = "--contexts 64 --budgets 1 0.2 --batches 2"
    record, out = run(attention, tmp_path, capsys, arguments, rounds=1)
    check_record(record, out, "decode attention of one layer")
    cells = record["results"]["cells"]
    assert [(cell["batch"], cell["kept"]) for cell in cells] == [(2, 64), (2, 13)]
    assert [len(cell["sides"]) for cell in cells] == [3, 5]
    side = cells[1]["sides"][attention.OURS]
    moved = 13 * 2 * 8 * 2 * 128 * 2
    assert side["GB_per_s"] == pytest.approx(moved / side["us"]["median"] / 1e3)
    assert [target["bound"] for target in record["results"]["targets"]] == [4.5, 1.05]


def test_attention_refuses_a_wrong_kernel(card, tmp_path, capsys, monkeypatch):
    class Wrong(attention.PagedDecode):
        def __call__(self, query, *others):
            super().__call__(query * 2, *others)

    monkeypatch.setattr(attention, "PagedDecode", Wrong)
    with pytest.raises(WrongResult, match="PagedDecode"):
        run(attention, tmp_path, capsys, "--contexts 64 --budgets 0.5 --batches 1")


def test_kernels(card, tmp_path, capsys):
    arguments = "--context 192 --layers 1 --append-batch 3 --decode-batch 1"
    record, out = run(kernels, tmp_path, capsys, arguments)
    check_record(record, out, "Triton kernels at 192 tokens")
    found = {one["name"]: one for one in record["results"]["kernels"]}
    assert len(found) == 13 and len(record["results"]["targets"]) == 11
    entries = 192 * 8 * 512
    assert found["write_entries, one layer"]["bytes"] == 2 * entries + 192 * 8 * 8
    assert found["cuts, all layers, head by head"]["bytes"] == 3 * 160 * 8 * 8
    one = found["paged_decode, 1 requests, one layer"]
    bandwidth = record["results"]["bandwidth_GB_per_s"] * 1e9
    floor = one["bytes"] / bandwidth
    assert one["times_floor"]["median"] == pytest.approx(one["us"]["median"] * 1e-6 / floor)


def test_kernels_refuse_a_wrong_compaction(card, monkeypatch):
    monkeypatch.setattr(compact_rows, "compact_rows", lambda *arguments: None)
    with pytest.raises(WrongResult, match="compact_rows"):
        kernels.compactions(192, 1)


@pytest.fixture
def small_model(monkeypatch):
    """Heads, matrix products and checks of a size for a CPU."""
    for module in (common, eviction):
        monkeypatch.setattr(module, "QUERY_HEADS", 8)
        monkeypatch.setattr(module, "KV_HEADS", 2)
    monkeypatch.setattr(eviction, "MATRICES", {name: (32, 64) for name in eviction.MATRICES})
    monkeypatch.setattr(eviction, "CHECKED_TOKENS", 96)
    monkeypatch.setattr(eviction, "TARGET_LENGTH", 96)


def test_eviction(card, small_model, tmp_path, capsys):
    arguments = "--lengths 96 --layers 2 --policies snapkv lava"
    record, out = run(eviction, tmp_path, capsys, arguments, rounds=1)
    check_record(record, out, "eviction of one prompt")
    (length,) = record["results"]["lengths"]
    assert set(length["policies"]) == {"snapkv", "lava"}
    assert len(record["results"]["targets"]) == 2
    raw = length["raw"]
    prefill = 2 * sum(raw[part]["ms"][0] for part in ("attention", *eviction.MATRICES))
    assert length["policies"]["lava"]["of_prefill"]["median"] == pytest.approx(raw["lava"]["ms"][0] / prefill)


def test_eviction_refuses_other_choices(card, small_model, monkeypatch):
    monkeypatch.setattr(eviction, "window_attention", lambda query, *others: torch.rand(8, 200 - len(query)))
    with pytest.raises(WrongResult, match="snapkv"):
        eviction.check_eviction(eviction.policy_config("snapkv", 0.2), 200, 1)


@pytest.mark.parametrize("policy", ["h2o", "criticalkv", "take"])
def test_eviction_names_policies_that_it_cannot_serve(policy, capsys):
    with pytest.raises(SystemExit):
        eviction.parse_arguments(["--policies", policy])
    assert policy in capsys.readouterr().err


def test_the_timer_counts_the_work_alone(monkeypatch):
    order: list[str] = []

    class FakeEvent:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: "FakeEvent") -> float:
            return 1.5

    monkeypatch.setattr(common, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(common, "FLUSH_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"sleep {cycles}"))
    timer = common.Timer()
    assert timer(lambda: order.append("work"), 2.0) == 1.5 and not timer.was_late
    assert order == ["sleep 4000000", "event", "work", "event", "wait"]
