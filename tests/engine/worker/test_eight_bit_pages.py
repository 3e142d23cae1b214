"""What a page format of 8 bits takes: here vLLM's own fp8 pages on CPUs, which the server does not use.

1. A storage of the type that its bytes mean: vLLM allocates uint8, and ``storage.view(torch.float8_e4m3fn)`` is the
   same memory. Then the parts of a page are found and read as those of any other type.
2. A ``write`` that stores numbers as they are. The probe writes whole numbers up to 7, which 8 bits hold, and refuses
   a writer that scales them; where a number lies does not depend on the scale.
3. Scales belong to whoever stores and attends, as here: one for the keys of a layer, one for its values. What is read
   is in the storage's numbers, and times its scale what was stored, rounded.

Nothing else of the cache knows of it: pages, lengths, compaction and copies move bytes. Scales for each entry would be
parts of the page, beside its keys and values. The op rounds towards zero, so storing again what was read may give
less than there was: bytes must move as they are.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache, PageFormat
from vllm_kvevict.cache.format import page_elements

PAGE_SIZE, HEAD_DIM, HEADS, GROUP, TOKENS, KEPT = 32, 64, 2, 4, 150, (40, 75)
SCALES = torch.tensor([0.3, 0.7])
"""Of keys and of values. No powers of two, by which nothing would be rounded a second time."""


class Fp8Pages:
    """A storage of float8 numbers as vLLM's ops store and read it, one sequence per KV head."""

    def __init__(self, cache_dtype):
        current_platform.import_kernels()
        self.cache_dtype = cache_dtype
        self.dtype = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        try:
            self.isa = _get_attn_isa(torch.bfloat16, PAGE_SIZE, HEAD_DIM, cache_dtype)
            torch.cpu._init_amx()
        except NotImplementedError as error:  # without AVX-512 and AMX
            pytest.skip(str(error))

    def write(self, storage, keys, values, entry_slots, scales=(1.0, 1.0)):
        """Keys and values, [N, head_dim], divided by their scale and rounded towards zero."""
        keys, values = (entries.to(torch.bfloat16)[:, None] for entries in (keys, values))
        views, scales = self._views(storage), map(float, scales)
        ops.cpu_attn_reshape_and_cache(keys, values, *views, entry_slots, self.isa, *scales, self.cache_dtype)

    def attend(self, storage, queries, block_table, seq_lens):
        """Output of the last query of each sequence, [S, group, head_dim]."""
        output, starts = torch.empty_like(queries), torch.arange(len(queries) + 1, dtype=torch.int32)
        shape = {"num_reqs": len(queries), "num_heads": GROUP, "num_kv_heads": 1, "head_dim": HEAD_DIM}
        metadata = ops.cpu_attn_get_scheduler_metadata(
            **shape,
            seq_lens=seq_lens,
            dtype=queries.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=False,
            kv_cache_dtype=self.cache_dtype,
        )
        ops.cpu_attention_with_kv_cache(
            queries,
            *self._views(storage),
            output,
            starts,
            seq_lens,
            HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0,
            scheduler_metadata=metadata,
            s_aux=None,
            k_scale=float(SCALES[0]),
            v_scale=float(SCALES[1]),
            kv_cache_dtype=self.cache_dtype,
        )
        return output

    def _views(self, storage):
        return storage.view(torch.uint8).view(len(storage), 1, 2 * PAGE_SIZE, HEAD_DIM).chunk(2, dim=2)


@pytest.fixture(params=["fp8", "fp8_e4m3", "fp8_e5m2"])
def pages(request):
    torch.manual_seed(0)
    return Fp8Pages(request.param)


@pytest.fixture
def stored(pages):
    """A cache in this format with one request, and what was stored: keys and values, [2, heads, tokens, head_dim]."""
    storage = torch.zeros(24, page_elements(PAGE_SIZE, HEAD_DIM), dtype=torch.uint8).view(pages.dtype)
    sizes = {"num_layers": 1, "num_kv_heads": HEADS, "page_size": PAGE_SIZE, "max_requests": 1}
    cache = PagedKVCache(storage, write=pages.write, **sizes)
    slots = cache.entry_slots(cache.extend([cache.open()], [TOKENS]))[0]
    entries = torch.randn(2, TOKENS, HEADS, HEAD_DIM).bfloat16()
    pages.write(storage, *entries.flatten(1, 2), slots, SCALES)
    return cache, entries.transpose(1, 2)


def decoded(cache):
    """Keys and values of all tokens, [2, heads, tokens, head_dim]."""
    numbers = torch.stack([cache.read_keys(0, 0, TOKENS), cache.read_values(0, 0, TOKENS)])
    return numbers.float() * SCALES.view(2, 1, 1, 1)


def bytes_of(cache, head, n):
    """Those of the first entries of a head, keys and values, [2, n, head_dim]."""
    entries, storage = torch.arange(n), cache.storage.view(torch.uint8)
    places = cache.table(0, 0)[head, entries // PAGE_SIZE], entries % PAGE_SIZE
    return torch.stack([part.read(storage, *places) for part in cache.format.parts])


def compact(cache):
    """Keep some entries of each head, and say whether their bytes are what they were, entry by entry."""
    kept = [torch.randperm(TOKENS)[:count].sort().values for count in KEPT]
    before = [bytes_of(cache, head, TOKENS)[:, entries] for head, entries in enumerate(kept)]
    cache.compact(0, 0, kept)
    after = [bytes_of(cache, head, count) for head, count in enumerate(KEPT)]
    return kept, all(map(torch.equal, before, after))


def test_what_is_read_is_what_was_stored_rounded_towards_zero(pages, stored):
    cache, entries = stored
    numbers = torch.arange(256, dtype=torch.uint8).view(pages.dtype).float()
    numbers = numbers[numbers.isfinite() & ~numbers.signbit()]
    scaled = entries.float() * (1 / SCALES).view(2, 1, 1, 1)
    rounded = numbers[torch.bucketize(scaled.abs().contiguous(), numbers, right=True) - 1].copysign(scaled)
    assert torch.equal(decoded(cache), rounded * SCALES.view(2, 1, 1, 1))


def test_a_compaction_moves_bytes(stored):
    assert compact(stored[0])[1]


def test_a_move_that_decodes_and_stores_again_is_noticed(pages, stored, monkeypatch):
    def move(self, storage, source, to):
        keys, values = (part.read(storage, *source).float() for part in self.parts)
        pages.write(storage, keys * SCALES[0], values * SCALES[1], to[0] * PAGE_SIZE + to[1], SCALES)

    monkeypatch.setattr(PageFormat, "move", move)
    assert not compact(stored[0])[1]


def test_attention_over_compacted_pages(pages, stored):
    """Equal to fp32 attention over the kept entries as they are decoded, and unlike that over all."""
    cache, _ = stored
    every, (kept, _) = decoded(cache), compact(cache)
    queries = torch.randn(HEADS, GROUP, HEAD_DIM).bfloat16()
    outputs = pages.attend(cache.storage, queries, cache.table(0, 0), cache.tables.kv_len[0])
    for head, entries in enumerate(kept):
        query, output = queries[head].float(), outputs[head].float()
        expected = scaled_dot_product_attention(query, *every[:, head, entries])
        torch.testing.assert_close(output, expected, atol=1e-2, rtol=1e-2)
        assert not torch.allclose(output, scaled_dot_product_attention(query, *every[:, head]), atol=1e-1)
