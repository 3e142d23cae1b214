"""What a rank stores of each token in each KV head, and the memory that this takes; needs no torch.

An entry is what a row stores of one token. It has fields, and ``page_size`` entries lie in a page, field after field.
Pages of keys and values, as kernels read them, [pages, page_elements] and contiguous:

    in rows                              keys transposed
    keys    [page_size, head_dim]        keys    [head_dim, page_size]
    values  [page_size, head_dim]        values  [page_size, head_dim]

Which order a page has depends on the processor (:mod:`vllm_kvevict.cache.format`); sizes do not. A field can also lie
aside, in a tensor [pages, page_size * numbers] of its own, where an entry has the same page and the same place.

Entries in 8 bits have keys and values in int8, and a scale of each; a page of them, in bytes:

    keys          [page_size, head_dim], on CPUs transposed
    key scales    [page_size], fp32
    value scales  [page_size], fp32
    values        [page_size, head_dim]
"""

import re
from dataclasses import dataclass

INT8 = "int8_per_token_head"
"""vLLM's name (``--kv-cache-dtype``) for entries in 8 bits."""


@dataclass(frozen=True)
class Field:
    """Numbers of an entry: its key, its value, a scale, a score.

    Attributes:
        dtype: torch's name of their type, in which the first number says how many bits it has.
        aside: whether they lie beside the pages.
        scale: name of the field whose number they are to be multiplied by; None: they are what they say.
        is_rotated: whether they were rotated before they were divided (:mod:`vllm_kvevict.kernels.quantise`).
    """

    name: str
    numbers: int
    dtype: str
    aside: bool = False
    scale: str | None = None
    is_rotated: bool = False

    @property
    def nbytes(self) -> int:
        """Their size."""
        bits = re.search(r"\d+", self.dtype)
        assert bits is not None, self.dtype
        return self.numbers * int(bits[0]) // 8


@dataclass(frozen=True)
class KVLayout:
    """Entries of a layer.

    Attributes:
        page_size: entries of a page.
        rows: KV heads of a rank.
        model_rows: KV heads of the model.
        fields: those of a page in their order, and those aside.
        dtype: torch's name of the type in which keys and values are computed and read.
    """

    page_size: int
    rows: int
    model_rows: int
    fields: tuple[Field, ...]
    dtype: str

    @classmethod
    def of_heads(
        cls,
        page_size: int,
        rows: int,
        model_rows: int,
        head_dim: int,
        dtype: str,
        is_quantised: bool = False,
    ) -> "KVLayout":
        """A key and a value of ``head_dim`` numbers each, in 8 bits with a scale each where they are quantised."""
        fields: tuple[Field, ...] = Field("key", head_dim, dtype), Field("value", head_dim, dtype)
        if is_quantised:
            fields = (
                Field("key", head_dim, "int8", scale="key_scale", is_rotated=True),
                Field("key_scale", 1, "float32"),
                Field("value_scale", 1, "float32"),
                Field("value", head_dim, "int8", scale="value_scale"),
            )
        return cls(page_size, rows, model_rows, fields, dtype)

    def __getitem__(self, name: str) -> Field:
        return {field.name: field for field in self.fields}[name]

    @property
    def computed_key(self) -> Field:
        """A key before it is stored; a query has its size."""
        return Field("key", self["key"].numbers, self.dtype)

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values have scales."""
        return self["key"].scale is not None

    @property
    def in_page(self) -> tuple[Field, ...]:
        """Fields that lie in pages."""
        return tuple(field for field in self.fields if not field.aside)

    @property
    def aside(self) -> tuple[Field, ...]:
        """Fields that lie aside."""
        return tuple(field for field in self.fields if field.aside)

    def pages_of(self, tokens: int) -> int:
        """Pages that a layer can have in the memory of so many tokens."""
        return tokens * self.rows // self.page_size

    @property
    def page_elements(self) -> int:
        """Numbers in a page."""
        return self.page_size * sum(field.numbers for field in self.in_page)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in its page."""
        return sum(field.nbytes for field in self.in_page)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.entry_bytes

    @property
    def aside_bytes(self) -> int:
        """Bytes of what lies aside of a page's entries."""
        return self.page_size * sum(field.nbytes for field in self.aside)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that a page takes of a rank's KV memory, with what lies aside."""
        return self.page_bytes + self.aside_bytes
