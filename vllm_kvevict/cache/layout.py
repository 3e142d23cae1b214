"""In which order the entries of a page are stored."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``write(storage, keys [N, D], values [N, D], entry_slots int64 [N])`` stores entry i in page
entry_slots[i] // page_size, at its place entry_slots[i] % page_size."""

Digits = tuple[tuple[int, int], ...]
"""(size, stride) of the mixed-radix digits of an index, most significant first."""


@dataclass(frozen=True)
class Order:
    """Place of the keys (or the values) in a page: a start, and a stride for each digit of token and dim."""

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

    def read(self, view: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entries ``tokens`` of ``pages`` (integer tensors that broadcast to a shape S), [*S, head_dim]."""
        index: list[torch.Tensor] = []
        step = 1
        for size, _ in reversed(self.token):
            index.append(tokens if len(self.token) == 1 else tokens // step % size)
            step *= size
        entries = view[(pages, *reversed(index))]
        return entries.flatten(entries.dim() - len(self.dim))


@dataclass(frozen=True)
class PageLayout:
    """Order of keys and of values in a page.

    A kernel may store a page as it likes (keys transposed, pairs of values interleaved for matrix
    instructions), as long as the place of (token, dim) is a sum over the mixed-radix digits of token and dim.
    Such an order is a strided view, so reading needs no kernel.
    """

    keys: Order
    values: Order

    @classmethod
    def probe(
        cls, write: Write, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "PageLayout":
        """Find the layout that ``write`` produces by writing numbered entries into two scratch pages.

        Raises:
            RuntimeError: ``write`` does not store each number exactly once, mixes keys with values, or its
                order is not a sum over digits.
        """
        half = page_size * head_dim
        numbers = torch.arange(2 * half, device=device).view(2, page_size, head_dim)
        entry_slots = torch.arange(2 * page_size, device=device)
        found = torch.zeros(2 * half, dtype=torch.int64, device=device)
        # Numbers go byte by byte, because bfloat16 holds no integer above 256 exactly.
        for shift in range(0, (2 * half - 1).bit_length(), 8):
            digit = (numbers >> shift & 255).to(dtype)
            scratch = torch.full((2, 2 * half), -1, dtype=dtype, device=device)
            write(scratch, digit[0].repeat(2, 1), digit[1].repeat(2, 1), entry_slots)
            if not torch.equal(scratch[0], scratch[1]):
                raise RuntimeError("cannot read the KV pages: the writer orders one page unlike another")
            found += scratch[0].to(torch.int64) << shift
        place = found.argsort()
        if not torch.equal(found[place], numbers.flatten()):
            raise RuntimeError("cannot read the KV pages: the writer does not store each element once")
        key_place, value_place = place.view(2, page_size, head_dim).cpu()
        if int(key_place.max()) >= half:
            raise RuntimeError("cannot read the KV pages: the writer mixes keys with values")
        return cls(_order(key_place, "key"), _order(value_place, "value"))

    @property
    def keys_are_transposed(self) -> bool:
        """Whether a page is its keys, transposed, [head_dim, page_size], then its values, [page_size, head_dim]."""
        if any(len(digits) > 1 for order in (self.keys, self.values) for digits in (order.token, order.dim)):
            return False
        ((page_size, _),), ((head_dim, _),) = self.keys.token, self.keys.dim
        return self == PageLayout(
            Order(0, ((page_size, 1),), ((head_dim, page_size),)),
            Order(page_size * head_dim, ((page_size, head_dim),), ((head_dim, 1),)),
        )

    def key_view(self, storage: torch.Tensor) -> torch.Tensor:
        """Keys of ``storage`` [num_pages, 2 * page_size * head_dim], for ``self.keys.read``."""
        return self.keys.view(storage)

    def value_view(self, storage: torch.Tensor) -> torch.Tensor:
        """Values of ``storage`` [num_pages, 2 * page_size * head_dim], for ``self.values.read``."""
        return self.values.view(storage)


def _order(place: torch.Tensor, name: str) -> Order:
    """The order in which element (t, d) lies at ``place[t, d]``."""
    token, dim = _digits(place[:, 0].tolist()), _digits(place[0].tolist())
    order = Order(int(place[0, 0]), token, dim)
    if torch.equal(order.start + _offsets(token)[:, None] + _offsets(dim), place):
        return order
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
