"""Exact page counts without page ids: what a scheduler needs to know of a worker's page tables. Owns nothing."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageCount:
    """Pages that a request holds on one rank, now and after any number of further tokens.

    Every further token adds one entry to each of the request's rows, a row being one (layer, KV head). So the
    count depends on nothing but the number of rows at each filling of their last page.

    Attributes:
        pages: pages held at ``tokens`` tokens.
        tokens: the request's token count at which ``pages`` was taken.
        rows: number of (layer, KV head) rows on the rank.
        gains: ``gains[r]`` pages more after ``r`` more tokens, for 0 <= r < page_size.
        is_upper_bound: whether it is the :meth:`most` that rows hold.
    """

    pages: int
    tokens: int
    rows: int
    gains: tuple[int, ...]
    is_upper_bound: bool = False

    @property
    def page_size(self) -> int:
        """Entries of a page."""
        return len(self.gains)

    @property
    def entries(self) -> int:
        """Entries of all rows together, where the count is of rows that are held, and no bound on them."""
        # rows - gains[k] last pages have room for k entries or more, so each is counted once per entry it has room for.
        room = sum(self.rows - gain for gain in self.gains[1:])
        return self.pages * self.page_size - room

    @property
    def partial(self) -> int:
        """Pages that are not full: the last one of each row that ends within one, where a page has several entries."""
        return self.rows - self.gains[1]

    @classmethod
    def start(cls, rows: int, page_size: int) -> "PageCount":
        """The count of a request that stores nothing yet."""
        return cls(0, 0, rows, (0, *[rows] * (page_size - 1)))

    @classmethod
    def from_residues(cls, pages: int, tokens: int, residues: Sequence[int]) -> "PageCount":
        """The count after an eviction.

        Args:
            pages: pages held.
            tokens: the request's token count at that moment.
            residues: [page_size], number of rows whose kv_len modulo page_size is the index.
        """
        page_size = len(residues)
        gains, crossed = [0], residues[0]
        for more in range(1, page_size):
            # A row with residue m > 0 takes a page once m + more exceeds the page; residue 0 with its first token.
            if more > 1:
                crossed += residues[page_size - more + 1]
            gains.append(crossed)
        return cls(pages, tokens, sum(residues), tuple(gains))

    def after_dropping(self, entries: int, tokens: int) -> "PageCount":
        """The count once ``tokens`` tokens are stored and each row has dropped so many entries.

        Those are not more than each has taken since ``self.tokens``.
        """
        rest = tokens - entries
        pages = self.at(rest)
        gains = (self.at(rest + more) - pages for more in range(self.page_size))
        return PageCount(pages, tokens, self.rows, tuple(gains), self.is_upper_bound)

    @classmethod
    def most(cls, entries: int, tokens: int, rows: int, page_size: int) -> "PageCount":
        """An upper bound: never below what ``rows`` rows hold which have so many entries together, wherever each ends.

        A page is missing at most page_size - 1 entries, and only the last one of a row is missing any.

        Args:
            entries: of all rows together.
            tokens: the request's token count at that moment.
        """
        pages = [(entries + rows * (more + page_size - 1)) // page_size for more in range(page_size)]
        return cls(pages[0], tokens, rows, tuple(count - pages[0] for count in pages), is_upper_bound=True)

    def at(self, tokens: int) -> int:
        """Pages held once ``tokens`` tokens (at least ``self.tokens``) are stored."""
        pages, left = divmod(tokens - self.tokens, len(self.gains))
        return self.pages + self.rows * pages + self.gains[left]
