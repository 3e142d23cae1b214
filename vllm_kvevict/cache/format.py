"""The memory of a pool of pages, and which bytes of it belong to which entry.

Owns the memory and its byte order; :mod:`vllm_kvevict.kernels.layout` says what an entry consists of. A kernel may
store a page as it likes (keys transposed, pairs of values interleaved for matrix instructions), as long as the place of
(token, dim) in a field is a sum over the mixed-radix digits of token and dim. Then a field is a strided view, and
reading needs no kernel. Fields fill a page and do not overlap. Whatever moves an entry copies its bytes and decodes
nothing; whoever reads a field gets numbers in the type in which the model computes them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_kvevict.kernels.layout import Field, KVLayout
from vllm_kvevict.kernels.quantise import dequantise

Write = Callable[..., None]
"""``write(storage, *entries, entry_slots int64 [N])`` stores entry i in page entry_slots[i] // page_size, at its place
entry_slots[i] % page_size. Entries are those of each field of a page, keys and values say, [N, numbers]."""

Places = tuple[torch.Tensor, torch.Tensor]
"""Entries of a storage: int64 [N], their pages; int64 [N], their places in these."""

Digits = tuple[tuple[int, int], ...]
"""(size, stride) of the mixed-radix digits of an index, most significant first."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their bytes; they stand for any bytes that are only moved."""

PROBE_BITS = 3
"""Of a number that the probe writes at once: whole numbers up to 7 are exact in all formats, 8-bit floats included."""


def dtype_of(field: Field) -> torch.dtype:
    """The type of a field's numbers."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype


@dataclass(frozen=True)
class Part:
    """Place of a field's numbers in a page: a start, and a stride for each digit of token and dim, in such numbers."""

    start: int
    token: Digits
    dim: Digits

    @classmethod
    def in_rows(cls, start: int, page_size: int, numbers: int) -> "Part":
        """[page_size, numbers], the numbers of an entry side by side."""
        return cls(start, ((page_size, numbers),), ((numbers, 1),))

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """View of ``storage`` as [num_pages, *token digits, *dim digits]."""
        sizes, strides = zip(*self.token, *self.dim, strict=True)
        return storage.as_strided(
            (storage.shape[0], *sizes),
            (storage.stride(0), *strides),
            storage.storage_offset() + self.start,
        )

    def at(self, pages: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Index of entries ``tokens`` of ``pages`` (integer tensors that broadcast) in a view."""
        index: list[torch.Tensor] = []
        step = 1
        for size, _ in reversed(self.token):
            index.append(tokens if len(self.token) == 1 else tokens // step % size)
            step *= size
        return pages, *reversed(index)

    def read(self, storage: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entries ``tokens`` of ``pages`` (integer tensors that broadcast to a shape S), [*S, numbers]."""
        entries = self.view(storage)[self.at(pages, tokens)]
        return entries.flatten(entries.dim() - len(self.dim))

    def move(self, storage: torch.Tensor, source: Places, to: Places) -> None:
        """Copy entries' bytes; all are read before any is written."""
        integers, part = self._as_bytes(storage)
        (_, step), (numbers, stride) = part.token[-1], part.dim[-1]
        in_one_piece = len(part.token) == len(part.dim) == stride == 1 and numbers == step
        if in_one_piece and integers.shape[1] % step == part.start % step == 0:
            # The storage consists of such pieces, and whole rows of a matrix are moved twice as fast.
            pieces, per_page, first = integers.view(-1, step), integers.shape[1] // step, part.start // step
            taken = pieces.index_select(0, source[0] * per_page + source[1].add(first))
            pieces.index_copy_(0, to[0] * per_page + to[1].add(first), taken)
            return
        view = part.view(integers)
        view[part.at(*to)] = view[part.at(*source)]

    def _as_bytes(self, storage: torch.Tensor) -> tuple[torch.Tensor, "Part"]:
        """Storage and part in the widest integers that hold neighbouring numbers of one entry and nothing else."""
        item, (numbers, stride) = storage.element_size(), self.dim[-1]
        steps = [self.start, storage.shape[1], storage.storage_offset()]
        steps += [step for _, step in (*self.token, *self.dim[:-1])]
        wide = math.gcd(8 // item, numbers, *steps) if stride == 1 else 1
        token, dim = (tuple((n, step // wide) for n, step in x) for x in (self.token, self.dim[:-1]))
        part = Part(self.start // wide, token, (*dim, (numbers // wide, stride)))
        return storage.view(INTEGERS[wide * item]), part


class PageMemory:
    """Pages, and what lies aside of their entries. Behind a row's entries pages may be read, and what is aside is not.

    Args:
        storage: [num_pages, page_elements], contiguous; bytes where fields of a page differ in their types.
        layout: of its entries.
        parts: where in a page its fields are, by their names.
        write: stores entries into the storage.

    Attributes:
        parts: of all fields, those aside among them.
        asides: the tensors that lie aside, [num_pages, page_size * numbers].

    Raises:
        ValueError: a size is not possible.
    """

    def __init__(
        self, storage: torch.Tensor, layout: KVLayout, parts: Mapping[str, Part], write: Write
    ) -> None:
        _check(storage, layout)
        size = layout.page_size
        self.storage, self.layout, self._write = storage, layout, write
        self._tensors = {field.name: storage.view(dtype_of(field)) for field in layout.in_page}
        self.parts = dict(parts)
        self.asides = []
        for field in layout.aside:
            shape, dtype = (len(storage), size * field.numbers), dtype_of(field)
            self.asides.append(torch.zeros(shape, dtype=dtype, device=storage.device))
            self._tensors[field.name] = self.asides[-1]
            self.parts[field.name] = Part.in_rows(0, size, field.numbers)

    @classmethod
    def probe(cls, storage: torch.Tensor, layout: KVLayout, write: Write) -> "PageMemory":
        """Memory in the order that ``write`` produces, which numbered entries in two scratch pages show.

        All fields of a page have the type of the storage.

        Raises:
            RuntimeError: ``write`` does not store each number exactly once, mixes fields, or its order is not a sum
                over digits.
            ValueError: a size is not possible.
        """
        _check(storage, layout)
        size, device, fields = layout.page_elements, storage.device, layout.in_page
        ends = torch.tensor([layout.page_size * field.numbers for field in fields]).cumsum(0).tolist()
        numbers = torch.arange(size, device=device)
        entry_slots = torch.arange(2 * layout.page_size, device=device)
        found = torch.zeros_like(numbers)
        for shift in range(0, (size - 1).bit_length(), PROBE_BITS):
            digits = (numbers >> shift & (1 << PROBE_BITS) - 1).to(storage.dtype).tensor_split(ends[:-1])
            entries = [digit.view(layout.page_size, -1).repeat(2, 1) for digit in digits]
            scratch = torch.full((2, size), -1.0, device=device).to(storage.dtype)
            write(scratch, *entries, entry_slots)
            first, second = scratch.to(torch.int64)
            if not torch.equal(first, second):
                raise RuntimeError("cannot read the KV pages: the writer orders one page unlike another")
            found += first << shift
        place = found.argsort()
        if not torch.equal(found[place], numbers):
            raise RuntimeError("cannot read the KV pages: the writer does not store each element once")
        places = place.cpu().tensor_split(ends[:-1])
        if any(int(part.max()) >= end for part, end in zip(places, ends, strict=True)):
            raise RuntimeError("cannot read the KV pages: the writer mixes the fields of entries")
        named = zip(fields, places, strict=True)
        parts = {field.name: _part(part.view(-1, field.numbers), field.name) for field, part in named}
        return cls(storage, layout, parts, write)

    @classmethod
    def quantised(
        cls, storage: torch.Tensor, layout: KVLayout, write: Write, keys_are_transposed: bool
    ) -> "PageMemory":
        """Memory of entries in 8 bits, in the order of :mod:`vllm_kvevict.kernels.layout`.

        Raises:
            ValueError: a size is not possible.
        """
        size, parts, start = layout.page_size, {}, 0
        for field in layout.in_page:
            first = start // dtype_of(field).itemsize
            parts[field.name] = Part.in_rows(first, size, field.numbers)
            start += size * field.nbytes
        if keys_are_transposed:
            parts["key"] = Part(0, ((size, 1),), ((layout["key"].numbers, size),))
        return cls(storage, layout, parts, write)

    @property
    def keys_are_transposed(self) -> bool:
        """Whether a page is its keys, transposed, [head_dim, page_size], then its values, [page_size, head_dim]."""
        size, head_dim = self.layout.page_size, self.layout["key"].numbers
        keys = Part(0, ((size, 1),), ((head_dim, size),))
        return self.parts["key"] == keys and self.parts["value"] == Part.in_rows(
            size * head_dim, size, head_dim
        )

    def read(self, name: str, pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """A field of entries ``tokens`` of ``pages`` (integers that broadcast to a shape S), [*S, numbers]."""
        field = self.layout[name]
        names = [name] if field.scale is None else [name, field.scale]
        return self.decode(name, {x: self.parts[x].read(self._tensors[x], pages, tokens) for x in names})

    def decode(self, name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A field's numbers, [..., numbers], from what is stored of them and of their scales, by names of fields."""
        field, numbers = self.layout[name], stored[name]
        if field.scale is None:
            return numbers
        scales, dtype = stored[field.scale].squeeze(-1), dtype_of(self.layout.computed_key)
        return dequantise(numbers, scales, dtype, field.is_rotated)

    def write(self, entries: Mapping[str, torch.Tensor], entry_slots: torch.Tensor) -> None:
        """Store entries, by the names of their fields, [N, numbers] each; slots as of :data:`Write`, none negative."""
        self._write(self.storage, *(entries[field.name] for field in self.layout.in_page), entry_slots)
        for field, aside in zip(self.layout.aside, self.asides, strict=True):
            aside.view(-1, field.numbers).index_copy_(0, entry_slots, entries[field.name])

    def move(self, source: Places, to: Places) -> None:
        """Copy the bytes of entries to other places; all of a field are read before any is written."""
        for name, part in self.parts.items():
            part.move(self._tensors[name], source, to)

    def move_pages(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy whole pages, int64 [N], to others."""
        for tensor in (self.storage, *self.asides):
            tensor[to] = tensor[source]

    def blank_pages(self, pages: torch.Tensor) -> None:
        """Set whole pages, integers [N], to zero: behind entries attention reads, and inf or NaN would spoil it."""
        integers = self.storage.view(INTEGERS[self.storage.element_size()])
        integers.index_fill_(0, pages.to(torch.int64), 0)

    def checksum(self, pages: torch.Tensor) -> int:
        """A number that changes when anything in pages, integers [N], or aside of them does (waits for the device)."""
        tensors, which = (self.storage, *self.asides), pages.to(torch.int64)
        words = torch.cat([tensor[which].flatten().view(torch.int64) for tensor in tensors])
        # By odd numbers, since products lose their highest bits: those of even ones would hide some changes.
        weights = 2 * torch.arange(words.numel(), device=words.device) + 1
        return int(words.mul_(weights).sum())


def _check(storage: torch.Tensor, layout: KVLayout) -> None:
    if layout.page_size < 16 or layout.page_size % 16:
        raise ValueError(f"page_size must be a multiple of 16, got {layout.page_size}")
    page_bytes = storage.element_size() * storage.shape[-1]
    if storage.dim() != 2 or page_bytes != layout.page_bytes or not storage.is_contiguous():
        raise ValueError(
            f"storage must be contiguous, in pages of {layout.page_bytes} bytes, got {list(storage.shape)} of "
            f"{storage.dtype}"
        )


def _part(place: torch.Tensor, name: str) -> Part:
    """The part in which element (t, d) lies at ``place[t, d]``."""
    token, dim = _digits(place[:, 0].tolist()), _digits(place[0].tolist())
    part = Part(int(place[0, 0]), token, dim)
    if torch.equal(part.start + _offsets(token)[:, None] + _offsets(dim), place):
        return part
    raise RuntimeError(
        f"cannot read the KV pages: the place of a {name} is not a sum over the digits of token and dim"
    )


def _digits(places: list[int]) -> Digits:
    """Digits of an index from the place of each value; each takes as many values as one stride explains."""
    digits: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = places[1] - places[0]
        size = 2
        while size < len(places) and places[size] - places[0] == size * stride:
            size += 1
        digits.append((size, stride))
        places = places[::size]
    return tuple(reversed(digits)) or ((1, 1),)


def _offsets(digits: Digits) -> torch.Tensor:
    """Offset of each value of an index."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in digits:
        offsets = (offsets[:, None] + stride * torch.arange(size)).flatten()
    return offsets
