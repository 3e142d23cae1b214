"""What is looked at while conversations are played: what the ledger adds up, and what happens to chains of prefixes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.engine.support.servers import Setup
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.nodes import Prefix
from vllm_kvevict.engine.scheduler.terms import Need


class Watched(Simulation):
    """After each step all sums over prefixes are made anew, and nobody holds more than was promised.

    Nor is anybody preempted while a prefix that nobody uses takes room.

    Attributes:
        longest: entries of the longest chain that a request began with.
        begun: how often one began with three or more.
        cut: tails that one took a part of.
        branches: prefixes that several others follow.
        waited: requests that waited for a prefix that somebody else was reading.
        dropped: prefixes that were dropped to make room.
        with_children: those of them that another one followed once.
        became_own: of the dropped ones those that a request borrowed.
        filled: most pages that requests used at once of what dropped prefixes had made full.
        left_in_completed: prefixes that such a request has left.
    """

    def __init__(self, setup: Setup, seed: int = 0, **kwargs: Any):
        super().__init__(setup, seed, **kwargs)
        self.longest = self.begun = self.cut = 0
        self.branches: set[int] = set()
        self.waited: set[str] = set()
        self.dropped: list[Prefix] = []
        self._had_children: set[int] = set()
        self.with_children = self.became_own = self.filled = 0
        self.left_in_completed: set[int] = set()
        self._used_by: dict[int, set[str]] = {}
        """Who went on in filled pages of a prefix, by its number."""
        self._promised: dict[tuple[str, int], list[int]] = {}
        self._watch_drops()
        self._watch_room()

    def _watch_drops(self) -> None:
        compressed = self.ledger.shared.compressed
        drop, droppable_pages = compressed.drop, compressed.droppable_pages

        def dropped(prefix: Prefix) -> None:
            self.became_own += bool(prefix.refs)
            if not prefix.is_invalid:
                self.dropped.append(prefix)
                self.with_children += prefix.number in self._had_children
            drop(prefix)

        def asked(untouchable: Prefix | None = None) -> list[int]:
            pages = droppable_pages(untouchable)
            assert pages == freed_by_drops(self, untouchable), "other drops free other pages"
            return pages

        compressed.drop, compressed.droppable_pages = dropped, asked

    def _watch_room(self) -> None:
        shared, books = self.ledger.shared, self.ledger.books
        before_growth = shared.before_growth

        def made(request: Request, account: Account, tokens: int, is_new: bool) -> Need | None:
            new = account if is_new else None
            if account.is_reading:
                shared.uncompressed.let_copy_if_idle(request, account, tokens)
            is_enough = books.fits(account, account.need_at(tokens), shared.droppable_pages(new))
            need = before_growth(request, account, tokens, is_new)
            assert (need is not None) == is_enough, "there is other room than what is dropped leaves"
            return need

        shared.before_growth = made

    def step(self) -> SchedulerOutput:
        unused = self._unused()
        output = super().step()
        assert not output.preempted_req_ids or not unused & self._unused(), "a prefix should have gone first"
        self._look_at(output)
        check_sums(self)
        self._check_promises()
        if not self.in_flight:
            check_exact(self)
        return output

    def _unused(self) -> set[int]:
        """Prefixes that nobody uses and that may be dropped."""
        droppable = self.ledger.shared.compressed.droppable(self.ledger.shared.compressed)
        return {prefix.number for prefix in droppable if not prefix.borrowers}

    def _look_at(self, output: SchedulerOutput) -> None:
        compressed = self.ledger.shared.compressed
        self.cut += len(output.kv_connector_metadata.cuts)
        for admission in output.kv_connector_metadata.admissions:
            self.longest = max(self.longest, len(admission.prefixes))
            self.begun += len(admission.prefixes) >= 3
        self.branches.update(prefix.number for prefix in compressed if prefix.children > 1)
        self.filled = max(self.filled, sum(sum(prefix.filled) for prefix in compressed if prefix.filled_for))
        for prefix in compressed:
            used_by = self._used_by.get(prefix.number, set())
            later = {child.number for child in prefix.filled_by if child.producer[0] in used_by}
            self.left_in_completed.update(later)
            self._used_by[prefix.number] = used_by | prefix.filled_for
        self._had_children.update(prefix.number for prefix in compressed if prefix.children)
        for request in self.scheduler.waiting:
            prefix = compressed.known(request)
            if prefix is not None and not prefix.is_ready:
                self.waited.add(request.request_id)

    def _check_promises(self) -> None:
        """While it has parts to read, by what was promised to it at any time: others were admitted beside that.

        What it borrows counts with both: it may become its own.
        """
        for name, account in self.ledger.accounts.items():
            if account.tokens >= account.plan.evicted_at:
                continue
            peak = plus(account.terms.peak, account.borrowed)
            before = self._promised.get((name, account.epoch), peak)
            most = [min(pair) for pair in zip(before, peak, strict=True)]
            self._promised[name, account.epoch] = most
            held = plus(account.held, account.borrowed)
            assert all(now <= then for now, then in zip(held, most, strict=True)), f"{name} holds too much"


def without_tails(setup: Setup) -> Watched:
    """A server whose requests leave none, so that what each reads says which chain it found."""
    simulation = Watched(setup)
    simulation.ledger.shared.tails.detach = lambda request, account, untold: None
    return simulation


def check_exact(simulation: Simulation) -> None:
    """Nothing is in flight: the ledger knows what every rank holds, and who borrows what."""
    workers, ledger = simulation.workers, simulation.ledger
    assert workers is not None
    # What the next step's message will free is the workers' until then; what is not reported yet is a bound.
    told = ledger.outbox.is_empty and set(workers.live) <= set(ledger.accounts)
    if told and not ledger.awaits_reports:
        assert [workers.held(rank) for rank in range(len(workers.ranks))] == ledger.books.held
        for prefix in ledger.shared.compressed:
            assert set(workers.borrowers(prefix.number)) == prefix.borrowers


def plus(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [sum(pair) for pair in zip(one, other, strict=True)]


def total(parts: Iterable[Sequence[int]], ranks: int) -> list[int]:
    """Sums for each rank."""
    rows = list(parts)
    return [sum(row[rank] for row in rows) for rank in range(ranks)]


def check_sums(simulation: Simulation) -> None:
    """Who uses each prefix, and the pages of all of them, by looking at all of them, beside what check mode does."""
    ledger = simulation.ledger
    compressed, accounts, ranks = ledger.shared.compressed, ledger.accounts, len(ledger.books.ranks)
    prefixes = list(compressed)
    users, storing = Counter(), Counter()
    for account in accounts.values():
        users.update(_chain(account.prefix))
    for prefix in prefixes:
        storing.update(() if prefix.is_ready else _chain(prefix))
    for prefix in prefixes:
        assert prefix.storing == storing[prefix]
        assert prefix.borrowers == {name for name, account in accounts.items() if account.prefix is prefix}
        followers = {child for child in prefixes if child.parent is prefix}
        assert {child for child in followers if any(child.fills)} <= prefix.filled_by <= followers
        for child in prefix.filled_by:
            assert not child.is_ready or child.fills == prefix.filled
        assert prefix.filled_for <= prefix.borrowers
    _check_borrowed(accounts)
    ends = sum(prefix.in_turns and not prefix.children for prefix in prefixes)
    assert compressed.sums.is_end == [ends]
    assert ledger.books.cached == total((node.held for kind in ledger.shared.kinds for node in kind), ranks)
    used = (prefix.held for prefix in prefixes if users[prefix] or storing[prefix])
    assert compressed.sums.used == total(used, ranks)
    assert compressed.pinned() == _pinned(prefixes, users, ranks)
    for last in {account.prefix for account in accounts.values()} - {None}:
        assert compressed.pinned(last) == _pinned(prefixes, users + Counter(_chain(last)), ranks)
        assert compressed.droppable_pages(last) == freed_by_drops(simulation, last)


def _chain(prefix: Prefix | None) -> list[Prefix]:
    """A prefix and all before it."""
    found = []
    while prefix is not None:
        found.append(prefix)
        prefix = prefix.parent
    return found


def _check_borrowed(accounts: Mapping[str, Account]) -> None:
    """Once all is reported, a request borrows the full pages of the whole chain that it goes on behind."""
    for name, account in accounts.items():
        if account.segment is None and account.pending is None:
            pages = [plus(prefix.full_pages, prefix.fills) for prefix in _chain(account.prefix)]
            if account.prefix is not None and name in account.prefix.filled_for:
                pages.append(account.prefix.filled)
            assert account.borrowed == total(pages, len(account.held))


def _pinned(prefixes: Sequence[Prefix], users: Mapping[Prefix, int], ranks: int) -> list[int]:
    """Pages that are no borrower's own and stay whatever is dropped; what one alone uses becomes its own."""
    shared = {entry for p in prefixes if users[p] > 1 and any(_lent(p, users)) for entry in _chain(p)}
    pages = [p.held if p in shared else _lent(p, users) for p in prefixes if users[p]]
    return total(pages, ranks)


def _lent(prefix: Prefix, users: Mapping[Prefix, int]) -> list[int]:
    """Pages of a prefix that are full, or that somebody uses who has made them full."""
    is_filled = prefix.filled_for or any(users[child] for child in prefix.filled_by)
    return plus(prefix.full_pages, prefix.filled) if is_filled else prefix.full_pages


def freed_by_drops(simulation: Simulation, untouchable: Prefix | None) -> list[int]:
    """Pages that are free once one prefix after the other is dropped, as long as any may be."""
    ledger = simulation.ledger
    compressed, ranks = ledger.shared.compressed, len(ledger.books.ranks)
    stay = {untouchable, *(ledger.accounts[name].prefix for name in ledger.outbox.admitted)}
    left, freed = list(compressed), []
    while True:
        parents = {prefix.parent for prefix in left}
        gone = [p for p in left if p.is_ready and p.page_refs <= 1 and p not in parents and p not in stay]
        if not gone:
            return total(freed, ranks)
        for prefix in gone:
            lent = _lent(prefix, Counter({p: p.refs for p in compressed})) if prefix.refs else [0] * ranks
            freed.append([held - pages for held, pages in zip(prefix.held, lent, strict=True)])
        left = [prefix for prefix in left if prefix not in gone]
