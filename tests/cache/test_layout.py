import pytest
import torch

from vllm_kvevict.cache import PageLayout

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


def read_back(layout, storage, page_size, head_dim):
    pages, tokens = torch.arange(storage.shape[0])[:, None], torch.arange(page_size)
    keys = layout.keys.read(layout.key_view(storage), pages, tokens)
    values = layout.values.read(layout.value_view(storage), pages, tokens)
    return keys.reshape(-1, head_dim), values.reshape(-1, head_dim)


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("order", ORDERS)
def test_reads_what_was_written(order, head_dim, page_size):
    for key_order, value_order in ((order, plain), (transposed, order)):
        write = writer(page_size, key_order, value_order)
        layout = PageLayout.probe(write, page_size, head_dim, torch.bfloat16, "cpu")
        storage = torch.zeros(3, 2 * page_size * head_dim, dtype=torch.bfloat16)
        keys = torch.randn(3 * page_size, head_dim).bfloat16()
        values = torch.randn(3 * page_size, head_dim).bfloat16()
        slots = torch.randperm(3 * page_size)
        write(storage, keys[slots], values[slots], slots)
        got_keys, got_values = read_back(layout, storage, page_size, head_dim)
        assert torch.equal(got_keys, keys)
        assert torch.equal(got_values, values)


def test_transposed_keys_are_one_stride_per_axis():
    layout = PageLayout.probe(writer(32), 32, 64, torch.bfloat16, "cpu")
    assert layout.keys == type(layout.keys)(0, ((32, 1),), ((64, 32),))
    assert layout.values == type(layout.values)(2048, ((32, 64),), ((64, 1),))
    storage = torch.zeros(5, 4096, dtype=torch.bfloat16)
    assert layout.key_view(storage).shape == (5, 32, 64)
    assert layout.key_view(storage).data_ptr() == storage.data_ptr()


def test_views_of_a_storage_that_starts_inside_an_allocation():
    write = writer(32)
    layout = PageLayout.probe(write, 32, 32, torch.float32, "cpu")
    storage = torch.zeros(4, 2048)[1:]
    keys, values = torch.randn(96, 32), torch.randn(96, 32)
    write(storage, keys, values, torch.arange(96))
    assert torch.equal(read_back(layout, storage, 32, 32)[0], keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_are_exact_in_every_dtype(dtype):
    assert PageLayout.probe(writer(64, dim_pairs), 64, 128, dtype, "cpu").keys.dim == ((64, 128), (2, 1))


@pytest.mark.parametrize("order", [scrambled, rotated])
def test_refuses_an_order_that_strides_cannot_describe(order):
    with pytest.raises(RuntimeError, match="place of a key is not a sum"):
        PageLayout.probe(writer(32, order), 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="place of a value is not a sum"):
        PageLayout.probe(writer(32, plain, order), 32, 64, torch.bfloat16, "cpu")


def test_refuses_a_writer_that_drops_or_converts():
    def silent(storage, keys, values, slots):
        pass

    def scaled(storage, keys, values, slots):
        writer(32)(storage, keys * 0.5, values, slots)

    for write in (silent, scaled):
        with pytest.raises(RuntimeError, match="does not store each element once"):
            PageLayout.probe(write, 32, 64, torch.bfloat16, "cpu")


def test_refuses_pages_that_differ_or_mix_keys_with_values():
    def first_page_only(storage, keys, values, slots):
        writer(32)(storage, keys, values, slots % 32)

    def swapped(storage, keys, values, slots):
        writer(32, plain, plain)(storage, values, keys, slots)

    with pytest.raises(RuntimeError, match="orders one page unlike another"):
        PageLayout.probe(first_page_only, 32, 64, torch.bfloat16, "cpu")
    with pytest.raises(RuntimeError, match="mixes keys with values"):
        PageLayout.probe(swapped, 32, 64, torch.bfloat16, "cpu")


@pytest.mark.parametrize(("page_size", "head_dim"), [(32, 64), (64, 128)])
def test_vllm_cpu_writer(page_size, head_dim):
    """The real kernel, with the order that this CPU uses."""
    pytest.importorskip("vllm")
    write = vllm_cpu_writer(page_size)
    layout = PageLayout.probe(write, page_size, head_dim, torch.bfloat16, "cpu")
    storage = torch.zeros(4, 2 * page_size * head_dim, dtype=torch.bfloat16)
    keys = torch.randn(4 * page_size, head_dim).bfloat16()
    values = torch.randn(4 * page_size, head_dim).bfloat16()
    slots = torch.randperm(4 * page_size)
    write(storage, keys[slots], values[slots], slots)
    got_keys, got_values = read_back(layout, storage, page_size, head_dim)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)


@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize("value_order", ORDERS)
def test_pages_that_the_decode_kernel_reads(key_order, value_order):
    layout = PageLayout.probe(writer(32, key_order, value_order), 32, 64, torch.bfloat16, "cpu")
    assert layout.keys_are_transposed is (key_order is transposed and value_order is plain)
