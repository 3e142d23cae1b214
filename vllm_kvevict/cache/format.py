"""Which bytes of a page belong to which entry: a page consists of parts, its keys and its values.

Owns the byte order. A kernel may store a page as it likes (keys transposed, pairs of values interleaved for matrix
instructions), as long as the place of (token, dim) in a part is a sum over the mixed-radix digits of token and dim.
Then a part is a strided view, and reading needs no kernel. Parts fill a page and do not overlap. Whatever moves an
entry copies its bytes and decodes nothing. Apart from kernels, nobody else computes with the size of a page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(storage, keys [N, D], values [N, D], entry_slots int64 [N])`` stores entry i in page
entry_slots[i] // page_size, at its place entry_slots[i] % page_size."""

Places = tuple[torch.Tensor, torch.Tensor]
"""Entries of a storage: int64 [N], their pages; int64 [N], their places in these."""

Digits = tuple[tuple[int, int], ...]
"""(size, stride) of the mixed-radix digits of an index, most significant first."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their bytes; they stand for any bytes that are only moved."""

PROBE_BITS = 3
"""Of a number that the probe writes at once: whole numbers up to 7 are exact in all formats, 8-bit floats included."""


def page_elements(page_size: int, head_dim: int) -> int:
    """Numbers in a page: keys and values of ``page_size`` entries."""
    return 2 * page_size * head_dim


def head_dim_of(storage: torch.Tensor, page_size: int) -> int:
    """Numbers in a key, or in a value, of a storage [num_pages, page_elements]."""
    return storage.shape[1] // (2 * page_size)


@dataclass(frozen=True)
class Part:
    """Place of an entry's numbers in a page: a start, and a stride for each digit of token and dim, in elements."""

    start: int
    token: Digits
    dim: Digits

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
        """Entries ``tokens`` of ``pages`` (integer tensors that broadcast to a shape S), [*S, head_dim]."""
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


@dataclass(frozen=True)
class PageFormat:
    """The parts of a page. Methods take a storage, [num_pages, page_elements], contiguous.

    Attributes:
        page_size: entries of a page.
        parts: they fill the page and do not overlap.
    """

    page_size: int
    parts: tuple[Part, ...]

    @classmethod
    def probe(
        cls, write: Write, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "PageFormat":
        """Find the format that ``write`` produces by writing numbered entries into two scratch pages.

        Raises:
            RuntimeError: ``write`` does not store each number exactly once, mixes keys with values, or its
                order is not a sum over digits.
        """
        size = page_elements(page_size, head_dim)
        numbers = torch.arange(size, device=device).view(2, page_size, head_dim)
        entry_slots = torch.arange(2 * page_size, device=device)
        found = torch.zeros(size, dtype=torch.int64, device=device)
        for shift in range(0, (size - 1).bit_length(), PROBE_BITS):
            digit = (numbers >> shift & (1 << PROBE_BITS) - 1).to(dtype)
            scratch = torch.full((2, size), -1.0, device=device).to(dtype)
            write(scratch, digit[0].repeat(2, 1), digit[1].repeat(2, 1), entry_slots)
            first, second = scratch.to(torch.int64)
            if not torch.equal(first, second):
                raise RuntimeError("cannot read the KV pages: the writer orders one page unlike another")
            found += first << shift
        place = found.argsort()
        if not torch.equal(found[place], numbers.flatten()):
            raise RuntimeError("cannot read the KV pages: the writer does not store each element once")
        key_place, value_place = place.view(2, page_size, head_dim).cpu()
        if int(key_place.max()) >= size // 2:
            raise RuntimeError("cannot read the KV pages: the writer mixes keys with values")
        return cls(page_size, (_part(key_place, "key"), _part(value_place, "value")))

    @property
    def keys(self) -> Part:
        """Where the keys are."""
        return self.parts[0]

    @property
    def values(self) -> Part:
        """Where the values are."""
        return self.parts[1]

    @property
    def keys_are_transposed(self) -> bool:
        """Whether a page is its keys, transposed, [head_dim, page_size], then its values, [page_size, head_dim]."""
        size, head_dim = self.page_size, math.prod(count for count, _ in self.keys.dim)
        return self.parts == (
            Part(0, ((size, 1),), ((head_dim, size),)),
            Part(size * head_dim, ((size, head_dim),), ((head_dim, 1),)),
        )

    def move(self, storage: torch.Tensor, source: Places, to: Places) -> None:
        """Copy the bytes of entries to other places; all of a part are read before any is written."""
        for part in self.parts:
            part.move(storage, source, to)

    def blank_pages(self, storage: torch.Tensor, pages: torch.Tensor) -> None:
        """Set whole pages, integers [N], to zero: behind entries attention reads, and inf or NaN would spoil it."""
        storage.view(INTEGERS[storage.element_size()]).index_fill_(0, pages.to(torch.int64), 0)

    def checksum(self, storage: torch.Tensor, pages: torch.Tensor) -> int:
        """A number that changes when anything in pages, integers [N], does (waits for the device)."""
        words = storage[pages.to(torch.int64)].flatten().view(torch.int64)
        # By odd numbers, since products lose their highest bits: those of even ones would hide some changes.
        weights = 2 * torch.arange(words.numel(), device=words.device) + 1
        return int(words.mul_(weights).sum())


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
    return tuple(reversed(digits))


def _offsets(digits: Digits) -> torch.Tensor:
    """Offset of each value of an index."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in digits:
        offsets = (offsets[:, None] + stride * torch.arange(size)).flatten()
    return offsets
