"""What a page format of 8 bits takes: here vLLM's own fp8 pages on CPUs, which the server does not use.

1. A storage of bytes, and a layout whose fields say what they mean: keys and values of 8 bits, and behind them in the
   page two scales in fp32 for each entry, of its key and of its value.
2. Where keys and values lie is found by a ``write`` that stores numbers as they are. The probe writes whole numbers up
   to 7, which 8 bits hold, and refuses a writer that scales them. Where scales lie is stated.
3. A ``write`` that stores keys and values divided by their scales, and the scales. What is read of keys is in their
   numbers, and times its scale what was stored, rounded.

Nothing else of the cache knows of it: pages, lengths, compaction and copies move bytes. The op rounds towards zero, so
storing again what was read may give less than there was: bytes must move as they are. The op attends with one scale for
a layer, so scales of entries need a kernel of their own.
"""

import dataclasses

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache, PageMemory
from vllm_kvevict.cache.format import Part
from vllm_kvevict.kernels.layout import Field, KVLayout

PAGE_SIZE, HEAD_DIM, HEADS, TOKENS, KEPT = 32, 64, 2, 150, (40, 75)
KEYS_AND_VALUES = 2 * PAGE_SIZE * HEAD_DIM
"""Bytes of a page."""
FIELDS = "key", "value", "scales"
SCALES = torch.tensor([0.3, 0.7])
"""Of keys and of values, on average. No powers of two, by which nothing would be rounded a second time."""


class Fp8Pages:
    """A storage of float8 numbers in the order of vLLM's ops."""

    def __init__(self, cache_dtype):
        current_platform.import_kernels()
        self.cache_dtype = cache_dtype
        self.dtype = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        try:
            self.isa = _get_attn_isa(torch.bfloat16, PAGE_SIZE, HEAD_DIM, cache_dtype)
            torch.cpu._init_amx()
        except NotImplementedError as error:  # without AVX-512 and AMX
            pytest.skip(str(error))

    def write(self, storage, keys, values, scales, slots):
        """Keys and values, [N, head_dim], divided by their scales, [N, 2], and rounded towards zero."""
        scales_of_page = storage.view(torch.float32)[:, KEYS_AND_VALUES // 4 :].view(-1, PAGE_SIZE, 2)
        scales_of_page[slots // PAGE_SIZE, slots % PAGE_SIZE] = scales
        divided = (torch.stack([keys, values]) / scales.t()[..., None]).bfloat16()
        self.write_numbers(storage, *divided, slots)

    def write_numbers(self, storage, keys, values, slots):
        """As they are, rounded towards zero."""
        keys, values, where = keys.bfloat16()[:, None], values.bfloat16()[:, None], self._views(storage)
        ops.cpu_attn_reshape_and_cache(keys, values, *where, slots, self.isa, 1.0, 1.0, self.cache_dtype)

    def memory(self, pages):
        """Pages of keys and values in the op's order, with their scales behind them."""
        name = str(self.dtype).removeprefix("torch.")
        whole = KVLayout.of_heads(PAGE_SIZE, HEADS, HEADS, HEAD_DIM, name)
        probed = PageMemory.probe(torch.zeros(1, KEYS_AND_VALUES).to(self.dtype), whole, self.write_numbers)
        parts = probed.parts | {"scales": Part.in_rows(KEYS_AND_VALUES // 4, PAGE_SIZE, 2)}
        layout = dataclasses.replace(whole, fields=(*whole.fields, Field("scales", 2, "float32")))
        return PageMemory(torch.zeros(pages, layout.page_bytes, dtype=torch.uint8), layout, parts, self.write)

    def _views(self, storage):
        keys_and_values = storage.view(torch.uint8)[:, :KEYS_AND_VALUES]
        return keys_and_values.view(len(storage), 1, -1, HEAD_DIM).chunk(2, dim=2)


@pytest.fixture(params=["fp8", "fp8_e4m3", "fp8_e5m2"])
def pages(request):
    torch.manual_seed(0)
    return Fp8Pages(request.param)


@pytest.fixture
def scales():
    """Of each entry, [tokens, heads, 2]."""
    return SCALES * (0.5 + torch.rand(TOKENS, HEADS, 2))


@pytest.fixture
def stored(pages, scales):
    """A cache in this format with one request, and what was stored: keys and values, [2, heads, tokens, head_dim]."""
    cache = PagedKVCache(pages.memory(24), num_layers=1, max_requests=1)
    slots = cache.entry_slots(cache.extend([cache.open()], [TOKENS]))[0]
    entries = torch.randn(2, TOKENS, HEADS, HEAD_DIM).bfloat16()
    numbers = *entries.flatten(1, 2), scales.flatten(0, 1)
    cache.memory.write(dict(zip(FIELDS, numbers, strict=True)), slots)
    return cache, entries.transpose(1, 2)


def decoded(cache):
    """Keys and values of all tokens, [2, heads, tokens, head_dim]."""
    key, value, scales = (cache.read(name, 0, 0, TOKENS).float() for name in FIELDS)
    return torch.stack([key, value]) * scales.permute(2, 0, 1)[..., None]


def bytes_of(cache, head, n):
    """Those of the first entries of a head, [n, bytes]."""
    entries = torch.arange(n)
    places = cache.table(0, 0)[head, entries // PAGE_SIZE], entries % PAGE_SIZE
    return torch.cat([cache.memory.read(name, *places).view(torch.uint8) for name in FIELDS], 1)


def compact(cache):
    """Keep some entries of each head, and say whether their bytes are what they were, entry by entry."""
    kept = [torch.randperm(TOKENS)[:count].sort().values for count in KEPT]
    before = [bytes_of(cache, head, TOKENS)[entries] for head, entries in enumerate(kept)]
    cache.compact(0, 0, kept)
    after = [bytes_of(cache, head, count) for head, count in enumerate(KEPT)]
    return all(map(torch.equal, before, after))


def test_what_is_read_is_what_was_stored_rounded_towards_zero(pages, scales, stored):
    cache, entries = stored
    numbers = torch.arange(256, dtype=torch.uint8).view(pages.dtype).float()
    numbers = numbers[numbers.isfinite() & ~numbers.signbit()]
    scales = scales.permute(2, 1, 0)[..., None]
    scaled = (entries.float() / scales).bfloat16().float()
    rounded = numbers[torch.bucketize(scaled.abs().contiguous(), numbers, right=True) - 1].copysign(scaled)
    assert torch.equal(decoded(cache), rounded * scales)


def test_a_compaction_moves_bytes(stored):
    assert compact(stored[0])


def test_a_move_that_decodes_and_stores_again_is_noticed(pages, stored, monkeypatch):
    def move(memory, source, to):
        key, value, scales = (memory.read(name, *source).float() for name in FIELDS)
        entries = (key * scales[:, :1]).bfloat16(), (value * scales[:, 1:]).bfloat16(), scales
        memory.write(dict(zip(FIELDS, entries, strict=True)), to[0] * PAGE_SIZE + to[1])

    monkeypatch.setattr(PageMemory, "move", move)
    assert not compact(stored[0])
