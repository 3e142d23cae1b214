"""What a page's bytes mean, found by writing to it, and entries that move without being decoded."""

import pytest
import torch

from vllm_kvevict.cache import PageMemory
from vllm_kvevict.cache.format import Part
from vllm_kvevict.kernels.layout import Field, KVLayout

from .writers import (
    dim_pairs,
    grouped_dim_pairs,
    layout_over,
    plain,
    rotated,
    scrambled,
    token_pairs,
    transposed,
    vllm_cpu_writer,
    writer,
)

ORDERS = [plain, transposed, dim_pairs, grouped_dim_pairs, token_pairs]


def probe(write, page_size=32, head_dim=64, dtype=torch.bfloat16, pages=3, skipped=0):
    """The memory of so many pages, which begins inside an allocation where some are skipped."""
    storage = torch.zeros(skipped + pages, 2 * page_size * head_dim).to(dtype)[skipped:]
    return PageMemory.probe(storage, layout_over(storage, page_size), write)


def check_what_is_read_back(write, page_size, head_dim):
    memory = probe(write, page_size, head_dim)
    keys, values = torch.randn(2, 3 * page_size, head_dim).bfloat16()
    slots = torch.randperm(3 * page_size)
    memory.write({"key": keys[slots], "value": values[slots]}, slots)
    for name, want in (("key", keys), ("value", values)):
        found = memory.read(name, torch.arange(3)[:, None], torch.arange(page_size))
        assert torch.equal(found.flatten(0, 1), want)


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("order", ORDERS)
def test_reads_what_was_written(order, head_dim, page_size):
    for key_order, value_order in ((order, plain), (transposed, order)):
        check_what_is_read_back(writer(page_size, key_order, value_order), page_size, head_dim)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]
)
def test_numbers_are_exact_in_every_dtype(dtype):
    assert probe(writer(64, dim_pairs), 64, 128, dtype).parts["key"].dim == ((64, 128), (2, 1))


@pytest.mark.parametrize("order", [scrambled, rotated])
def test_refuses_an_order_that_strides_cannot_describe(order):
    with pytest.raises(RuntimeError, match="place of a key is not a sum"):
        probe(writer(32, order))
    with pytest.raises(RuntimeError, match="place of a value is not a sum"):
        probe(writer(32, plain, order))


def test_refuses_a_writer_that_drops_or_converts():
    def silent(storage, keys, values, slots):
        pass

    def scaled(storage, keys, values, slots):
        writer(32)(storage, keys * 0.5, values, slots)

    for write in (silent, scaled):
        with pytest.raises(RuntimeError, match="does not store each element once"):
            probe(write)


def test_refuses_pages_that_differ_or_mix_keys_with_values():
    def first_page_only(storage, keys, values, slots):
        writer(32)(storage, keys, values, slots % 32)

    def swapped(storage, keys, values, slots):
        writer(32, plain, plain)(storage, values, keys, slots)

    with pytest.raises(RuntimeError, match="orders one page unlike another"):
        probe(first_page_only)
    with pytest.raises(RuntimeError, match="mixes the fields"):
        probe(swapped)


def places_of(slots, page_size):
    return slots // page_size, slots % page_size


def any_bytes(tensor):
    """Fill a tensor with bytes that mean all kinds of numbers, among them every NaN."""
    size = tensor.numel() * tensor.element_size()
    tensor.view(torch.uint8).copy_(torch.randint(256, (size,), dtype=torch.uint8).view(len(tensor), -1))


def bytes_of(memory, places):
    """Bytes of entries, one field after the other."""
    return [memory.read(field.name, *places).view(torch.uint8) for field in memory.layout.fields]


def check_moves(memory, entries):
    """Entries move onto places that are read too, as in a compaction, and nothing else changes."""
    size = memory.layout.page_size
    source, to = torch.randperm(entries)[: entries // 2], torch.randperm(entries)[: entries // 2]
    want = bytes_of(memory, places_of(torch.arange(entries), size))
    for part in want:
        part[to] = part[source]
    memory.move(places_of(source, size), places_of(to, size))
    assert all(map(torch.equal, bytes_of(memory, places_of(torch.arange(entries), size)), want))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("order", ORDERS)
def test_entries_move_as_bytes_and_nothing_else_changes(order, head_dim, dtype):
    """Whatever the bytes would mean as numbers."""
    for key_order, value_order in ((order, plain), (transposed, order)):
        memory = probe(writer(32, key_order, value_order), 32, head_dim, dtype, 6, skipped=1)
        any_bytes(memory.storage)
        before = memory.storage.view(torch.uint8).clone()
        check_moves(memory, 192)
        assert not torch.equal(memory.storage.view(torch.uint8), before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_blank_pages_are_zero_and_others_stay(order, dtype):
    memory = probe(writer(32, order, order), 32, 48, dtype, 6)
    any_bytes(memory.storage)
    want = bytes_of(memory, places_of(torch.arange(192), 32))
    memory.blank_pages(torch.tensor([4, 1], dtype=torch.int32))
    for part in want:
        part[128:160] = part[32:64] = 0
    assert all(map(torch.equal, bytes_of(memory, places_of(torch.arange(192), 32)), want))


def quantised():
    """Pages of 8-bit keys and values with scales before the values, and scores aside; each has bytes of its own."""
    in_page = {"key": (33, "uint8"), "scale": (1, "float32"), "value": (7, "uint8")}
    fields = [Field(name, *of) for name, of in in_page.items()]
    layout = KVLayout(16, 1, 1, (*fields, Field("score", 1, "float16", aside=True)), "float32")
    starts = [0, 16 * 33 // 4, 16 * 37]  # in numbers of each
    parts = {x.name: Part.in_rows(start, 16, x.numbers) for x, start in zip(fields, starts, strict=True)}

    def write(storage, *entries):
        for part, numbers in zip(parts.values(), entries[:-1], strict=True):
            part.view(storage.view(numbers.dtype))[entries[-1] // 16, entries[-1] % 16] = numbers

    memory = PageMemory(torch.zeros(4, layout.page_bytes, dtype=torch.uint8), layout, parts, write)
    entries = {"key": torch.randint(256, (64, 33)).to(torch.uint8), "scale": torch.randn(64, 1)}
    entries |= {"value": torch.randint(256, (64, 7)).to(torch.uint8), "score": torch.randn(64, 1).half()}
    memory.write(entries, torch.arange(64))
    return memory, entries


def test_fields_of_several_types_and_aside():
    """Where entries are no pieces of the page, which is no multiple of them, nor of wide integers."""
    memory, entries = quantised()
    assert (memory.layout.entry_bytes, memory.layout.page_bytes, memory.layout.aside_bytes) == (44, 704, 32)
    for name, numbers in entries.items():
        assert torch.equal(memory.read(name, *places_of(torch.arange(64), 16)), numbers)
    check_moves(memory, 64)
    want = bytes_of(memory, places_of(torch.arange(48, 64), 16))
    memory.move_pages(torch.tensor([3]), torch.tensor([1]))
    assert all(map(torch.equal, bytes_of(memory, places_of(torch.arange(16, 32), 16)), want))


@pytest.mark.parametrize("make", [lambda: probe(writer(32), 32, 16, pages=5), lambda: quantised()[0]])
def test_a_checksum_sees_each_byte_and_the_order_of_pages(make):
    memory = make()
    any_bytes(memory.storage)
    pages = torch.tensor([3, 1], dtype=torch.int32)
    checksum = memory.checksum(pages)
    for tensor in (memory.storage, *memory.asides):
        words = tensor.view(torch.uint8)
        for byte in (0, 1, 7, -1):
            words[3, byte] += 1
            assert memory.checksum(pages) != checksum
            words[3, byte] -= 1
        words[2] += 1
    assert memory.checksum(pages) == checksum != memory.checksum(pages.flip(0))


@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 64), (64, 128)])
def test_vllm_cpu_writer(page_size, head_dim):
    """The real kernel, with the order that this CPU uses."""
    pytest.importorskip("vllm")
    check_what_is_read_back(vllm_cpu_writer(page_size), page_size, head_dim)


@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize("value_order", ORDERS)
def test_pages_that_the_decode_kernel_reads(key_order, value_order):
    memory = probe(writer(32, key_order, value_order))
    assert memory.keys_are_transposed is (key_order is transposed and value_order is plain)
