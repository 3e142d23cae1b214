"""When the project's kernels serve decodes and prompts, and when vLLM's op does."""

import itertools
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from tests.cache.writers import layout_over
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.devices import CPU
from vllm_kvevict.engine.worker import attach, calibration, cpu
from vllm_kvevict.engine.worker.timings import Times
from vllm_kvevict.kernels import build
from vllm_kvevict.kernels.build import BuildError
from vllm_kvevict.kernels.decode_attention import DecodeAttention
from vllm_kvevict.kernels.layout import INT8, KVLayout
from vllm_kvevict.kernels.prefill_attention import PrefillAttention


@pytest.fixture(autouse=True)
def timed_anew(monkeypatch, tmp_path):
    """Each choice is timed: no file has times yet."""
    numbers = itertools.count()
    monkeypatch.setattr(cpu, "times_file", lambda *_: tmp_path / f"{next(numbers)}.json")


def _cache(transposed=True, dtype=torch.bfloat16):
    return SimpleNamespace(
        memory=SimpleNamespace(keys_are_transposed=transposed),
        storage=torch.zeros(1, 2 * 32 * 64, dtype=dtype),
        page_size=32,
        head_dim=64,
    )


def _kernel(softcap=0.0, drafts=0, **of_cache):
    cache, vllm_config = _cache(**of_cache), SimpleNamespace(num_speculative_tokens=drafts)
    return _pages(cache.storage, vllm_config).decode_attention(cache, 2, softcap)


def _prefill_kernel(**of_cache):
    cache = _cache(**of_cache)
    return _pages(cache.storage).prefill_attention(cache, 2)


def _pages(storage, vllm_config=None, group=None):
    return cpu.CPUPages(storage, layout_over(storage, 32, 4), vllm_config, group)


@pytest.mark.parametrize(
    "unlike", [{}, {"transposed": False}, {"dtype": torch.float16}, {"softcap": 30.0}], ids=str
)
def test_what_the_kernels_serve(monkeypatch, unlike):
    monkeypatch.setattr(cpu, "_is_faster", lambda *_: True)
    assert isinstance(_kernel(**unlike), DecodeAttention) == (not unlike)
    if "softcap" not in unlike:
        assert isinstance(_prefill_kernel(**unlike), PrefillAttention) == (not unlike)


@pytest.fixture
def amx(monkeypatch):
    """A processor with AMX, where vLLM's op has an order of its own for bfloat16, which our kernels cannot read."""
    monkeypatch.setattr(cpu, "_get_attn_isa", lambda dtype, *_: "amx" if dtype == torch.bfloat16 else "vec")
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)


def _times(monkeypatch, prompts, decodes):
    """Let our kernels take so much of the op's time."""
    monkeypatch.setattr(cpu, "time_prefills", lambda *_: Times(prompts, 1.0))
    monkeypatch.setattr(cpu, "time_decodes", lambda *_: Times(decodes, 1.0))


@pytest.mark.parametrize(
    "prompts, decodes, are_ours", [(0.5, 0.9, True), (1.1, 0.5, False), (0.5, 1.1, False)]
)
def test_with_amx_pages_have_our_order_if_both_kernels_are_faster(
    monkeypatch, log, amx, prompts, decodes, are_ours
):
    _times(monkeypatch, prompts, decodes)
    storage = _cache().storage
    pages = _pages(storage, None, 2)
    assert pages.isa == pages._likewise(storage).isa == ("vec" if are_ours else "amx")
    ((severity, message),) = log
    assert severity == ("INFO" if are_ours else "WARNING")
    assert f"take {prompts:.2f} and {decodes:.2f} times as long" in message
    cache = _cache(transposed=are_ours)
    assert isinstance(pages.prefill_attention(cache, 2), PrefillAttention) == are_ours
    assert isinstance(pages.decode_attention(cache, 2, 0.0), DecodeAttention) == are_ours
    assert len(log) == 1  # what was said is not said again


def test_with_amx_pages_have_the_ops_order_where_no_kernel_may_serve(monkeypatch, amx):
    _times(monkeypatch, 0.1, 0.1)
    assert _pages(_cache().storage).isa == "amx"
    assert _pages(_cache(dtype=torch.float32).storage, None, 2).isa == "vec"


def test_where_linux_refuses_amx_nobody_uses_it(monkeypatch, amx):
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    assert _pages(_cache().storage).isa == "vec"


@pytest.fixture
def log():
    """What the module logs: level and message."""
    seen: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda entry: seen.append((entry.levelname, entry.getMessage()))
    before = cpu.logger.level
    cpu.logger.addHandler(handler)
    cpu.logger.setLevel(logging.INFO)
    yield seen
    cpu.logger.removeHandler(handler)
    cpu.logger.setLevel(before)


def test_without_a_compiler_there_is_a_warning_and_vllms_op(monkeypatch, log):
    def fail(*_):
        raise BuildError("no C++ compiler was found: install g++, or set CXX to one")

    monkeypatch.setattr(calibration, "DecodeAttention", fail)
    monkeypatch.setattr(calibration, "PrefillAttention", fail)
    assert _kernel() is None and _prefill_kernel() is None
    (_, decoding), (_, reading) = log
    for what, message in (("decoding", decoding), ("reading prompts", reading)):
        assert f"{what} uses" in message and "slower" in message and "install g++" in message


def _slowed(monkeypatch, side, factor=20):
    """Let a side of the comparison do its step several times."""
    make_step = getattr(calibration, side)

    def make_slow_step(*args):
        step = make_step(*args)

        def run(table):
            for _ in range(factor):
                step(table)

        return run

    monkeypatch.setattr(calibration, side, make_slow_step)


@pytest.mark.parametrize(
    "make, slowed, is_ours",
    [
        (_kernel, "kernel_step", False),
        (_kernel, "op_step", True),
        (_prefill_kernel, "prefill_step", False),
        (_prefill_kernel, "op_step", True),
    ],
)
def test_the_faster_one_is_used_and_the_log_says_by_how_much(monkeypatch, log, make, slowed, is_ours):
    _slowed(monkeypatch, slowed)
    assert (make() is not None) == is_ours
    ((severity, message),) = log
    assert severity == ("INFO" if is_ours else "WARNING")
    (times,) = re.findall(r"takes (\d+\.\d\d) times", message)
    assert (float(times) < 1) == is_ours


def test_the_next_start_chooses_the_same_kernel(monkeypatch, log, tmp_path):
    """Though it would find another one faster."""
    monkeypatch.setattr(cpu, "times_file", lambda kernel, shape: tmp_path / f"{kernel}.json")
    with monkeypatch.context() as first_start:
        _slowed(first_start, "op_step")
        assert isinstance(_prefill_kernel(), PrefillAttention)
    _slowed(monkeypatch, "prefill_step")
    assert isinstance(_prefill_kernel(), PrefillAttention)
    assert len({message for _, message in log}) == 1
    (tmp_path / "prefill_attention.json").unlink()
    assert _prefill_kernel() is None
    assert str(tmp_path / "prefill_attention.json") in log[-1][1]


def test_drafts_are_timed_apart(monkeypatch, log):
    """Reading counts less and arithmetic more then, so that the op may be faster at that alone."""
    make_step, slow = calibration.kernel_step, [1]

    def make(shape, storage):
        step = make_step(shape, storage)
        return lambda table: [step(table) for _ in range(20 if shape.new_tokens in slow else 1)]

    monkeypatch.setattr(calibration, "kernel_step", make)
    _slowed(monkeypatch, "op_step", 4)
    assert _kernel(drafts=5) is None
    slow[:] = [6]
    assert _kernel(drafts=5).most_new_tokens == 1
    slow[:] = []
    assert _kernel(drafts=5).most_new_tokens == 6
    assert _kernel(drafts=0).most_new_tokens == 1
    messages = [message for _, message in log]
    assert [message.split(" uses ")[0] for message in messages] == [
        "KV eviction: decoding",
        *["KV eviction: decoding", "KV eviction: decoding with 5 drafts"] * 2,
        "KV eviction: decoding",
    ]


def _readable(storage, layout):
    """Pages that both sides read: in the order of fp32, since with AMX the op has one of its own for bfloat16."""
    pages = cpu.CPUPages(storage, layout, None)
    pages.isa = cpu._get_attn_isa(torch.float32, 32, pages.head_dim)
    return pages


@pytest.mark.parametrize("side", ["kernel_step", "prefill_step"])
@pytest.mark.parametrize("new_tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim, heads, group", [(64, 4, 2), (128, 1, 8)])
def test_both_sides_of_the_comparison_do_the_same_work(side, dtype, head_dim, heads, group, new_tokens):
    """Their outputs and what they store are equal, so that the times are of the same step."""
    shape = calibration.Shape(
        KVLayout.of_heads(32, heads, heads, head_dim, str(dtype)[len("torch.") :]), group, new_tokens
    )
    table = torch.arange(2 * heads * 3, dtype=torch.int32).view(2, heads, 3)
    storages, outputs = [], []
    make_steps = {
        "kernel_step": calibration.kernel_step,
        "prefill_step": lambda s, x: calibration.prefill_step(s, _readable(x, s.layout), x),
        "op_step": lambda s, x: calibration.op_step(s, _readable(x, s.layout)),
    }
    for make_step in (make_steps[side], make_steps["op_step"]):
        random, elements = torch.Generator().manual_seed(1), shape.layout.page_elements
        storage = torch.randn(table.numel(), elements, generator=random)
        storages.append(storage.to(dtype))
        outputs.append(make_step(shape, storages[-1])(table).view(2, -1))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(*storages, atol=0, rtol=0)


@pytest.mark.parametrize("missing", ["quantise", "decode_attention", "prefill_attention", "softcap", "sinks"])
def test_entries_in_8_bits_need_our_kernels(monkeypatch, missing):
    compiled = build._load

    def load(name, level):
        if name == missing:
            raise OSError("no space left")
        return compiled(name, level)

    monkeypatch.setattr(build, "_load", load)
    layout = KVLayout.of_heads(32, 2, 2, 32, "float32", is_quantised=True)
    storage = torch.zeros(1, layout.page_bytes, dtype=torch.int8)
    layer = SimpleNamespace(impl=SimpleNamespace(softcap=float(missing == "softcap"), sinks=None))
    if missing == "sinks":
        layer.impl.sinks = torch.zeros(2)
    with pytest.raises(KVEvictionError, match=f"{INT8}.*(no space left|soft caps).*leave"):
        attach._pages(CPU, storage, layout, SimpleNamespace(num_speculative_tokens=0), None, layer)
    layer.impl.softcap, layer.impl.sinks = 0.0, None
    monkeypatch.undo()
    attach._pages(CPU, storage, layout, SimpleNamespace(num_speculative_tokens=0), None, layer)
