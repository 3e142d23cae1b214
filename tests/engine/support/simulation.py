"""vLLM's real scheduler with our ledger, against workers that keep lengths instead of keys and values.

The workers do what the runtime does with a step: free, open, grow, evict, report. They count pages from their own
lengths and know nothing of the ledger, so that every disagreement shows.
"""

import functools
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.engine.support.choices import GREEDS, Choices
from tests.engine.support.servers import (
    DIMS,
    PAGE,
    STOP,
    TOKEN,
    Setup,
    capacities,
    make_scheduler,
    options_of,
)
from tests.engine.support.windows import WindowBlocks, check_repeat
from vllm_kvevict.engine.messages import Holdings, RankMessage, StorePrefix, WorkerMessages
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.policies import take
from vllm_kvevict.policies.cuts import NO_KEYS, CutQuery, tally
from vllm_kvevict.policies.kvzip import MOST_SINKS
from vllm_kvevict.schedules.plan import Admission, Phase, Plan
from vllm_kvevict.schedules.registry import repeats_prompt, schedule_of
from vllm_kvevict.schedules.reports import Claim, ExtraTokens, LayerWeights, PartOfEviction, Report

CROSS_STAGE = ("by weight", "by score", "by repeat")
"""Schedules that pipeline stages follow together."""

CUTS = (1 << 62, (0x3F12 << 48) + 12345, -(1 << 40) + 777)
"""Where the order keys of a request that stay begin."""


@dataclass
class Resident:
    """A request on the workers.

    Attributes:
        kv_len: length of each of its rows, by rank.
        waits: whether it waits for budgets, or for its prompt to be repeated.
        repeated: tokens of the prompt that were repeated so far.
        store: the prefix that is cached once it is evicted.
        lent: by rank, pages of each row that it borrows; None where it borrows none.
        prefix: number of the one that it borrows of.
        segments: number, and how many columns, of each segment that it borrows.
        prompt: its tokens, as far as they were known when it was admitted.
        resets: of the cache before its first token was read. All that it stores counts as read then, since later tokens
            have seen the first one.
    """

    admission: Admission
    kv_len: list[np.ndarray]
    tokens: int = 0
    waits: bool = False
    repeated: int = 0
    kept: list[np.ndarray] | None = None
    store: StorePrefix | None = None
    lent: list[np.ndarray] | None = None
    prefix: int | None = None
    segments: list[tuple[int, int]] = field(default_factory=list)
    pinned: list[np.ndarray] | None = None
    prompt: list[int] = field(default_factory=list)
    resets: int = 0

    @property
    def columns(self) -> int:
        """Columns that it borrows of segments."""
        return sum(columns for _, columns in self.segments)

    @property
    def plan(self) -> Plan:
        return self.admission.plan

    @property
    def needs_sums(self) -> bool:
        """Whether what its prompt adds up to is still needed; a cached prefix was evicted before."""
        end = self.plan.evicted_at
        if self.admission.tokens >= end:
            return False
        return self.tokens < end or (self.repeats_prompt and self.repeated != self.plan.parts[-1].repeated_at)

    @property
    def part(self) -> Phase:
        """The phase of its last token, of a prompt that is evicted."""
        return self.plan.part_of(self.tokens - 1)

    @property
    def repeats_prompt(self) -> bool:
        """Whether its prompt, or a part of it, is evicted once that was repeated."""
        return repeats_prompt(self.plan)

    @property
    def repeats_part(self) -> bool:
        """Whether the phase of its last token evicts once that was repeated."""
        return schedule_of(self.part).repeats_prompt

    @property
    def is_repeated_now(self) -> bool:
        """Whether it has as many tokens as when its prompt, or a part of it, is repeated."""
        return any(schedule_of(x).repeats_prompt and self.tokens == x.repeated_at for x in self.plan.parts)

    @property
    def is_in_answer(self) -> bool:
        """Whether its answer has come to a position at which it is evicted."""
        answer = self.plan.answer
        return answer is not None and self.tokens in answer.positions

    def evicted_until(self, tokens: int) -> tuple[Any, ...]:
        """What was read of its first tokens, and how they were evicted."""
        parts = [part for part in self.plan.parts if part.end <= tokens]
        configs = [(part.config.policy, part.config.items, part.config.least_window) for part in parts]
        how = [(part.begins, part.end, *config) for part, config in zip(parts, configs, strict=True)]
        return self.prompt[:tokens], how

    @property
    def is_at_end(self) -> bool:
        """Whether it has as many tokens as its prompt, or a part of it, when that is evicted for the last time."""
        return any(self.tokens == part.end for part in self.plan.parts)


def _seen_before(resident: Resident, chunk: ExtraTokens, rows: np.ndarray) -> int:
    """Entries of a rank's rows that a repeat copies before a chunk's: sinks, or what is left of earlier parts."""
    sinks: int = resident.plan.config.params["sinks"]
    if not resident.part.begins:
        return min(sinks, chunk.start)
    return min(sinks, MOST_SINKS, int(rows.min()) - resident.part.n)


def extra_tokens(resident: Resident, position: int) -> int:
    """Tokens that a step which ends at a position computes beside a prompt's, to choose by them."""
    prompt = resident.plan.prompt
    return 0 if prompt is None else prompt.extra_tokens(position)


def schedule(resident: Resident) -> str:
    """Name of the schedule by which the part of a request's last token is evicted."""
    return resident.part.schedule


@dataclass
class TailRows:
    """What an ended request has left.

    Attributes:
        prefix: number of the cached prefix that it follows.
        kv_len: length of each of its rows with that prefix, by rank.
        tokens: those behind the prefix, None where they are not known.
    """

    prefix: int
    kv_len: list[np.ndarray]
    tokens: list[int | None]

    def cut(self, count: int) -> None:
        """Drop the newest tokens."""
        assert 0 < count < len(self.tokens)
        del self.tokens[-count:]
        for rows in self.kv_len:
            rows -= count


class Workers:
    """All ranks; they see the steps in the same order.

    Attributes:
        evictions: (request id, epoch, token count) of every eviction so far.
        peak_pages: most pages ever held on each rank.
        most_reserved: most of the reserve ever in use.
        cached: lengths of the rows of cached prefixes, by number and rank.
        segments: by number the tokens of each segment, None where they were not known.
        tails: what ended requests have left, by number.
        filled: pages of prefixes that others have filled so far.
        hits, shares, taken: requests that began with one, or with segments; and with a tail.
        dropped: numbers of those that were dropped, in order.
        most_rounds: of questions that any eviction took.
        tamper: changes a report before it is sent.
        resets: of the cache so far; each is taken for new weights, with which requests keep something else.
        is_emptied: whether the last one said that nothing from before is in use, and no step has shown that yet.
        belongs: salt and LoRA adapter of each request; only who has the same shares what it has read.
        blocks: of vLLM's blocks those that are pages, where other layers share the memory.
        ring: requests that have a part of the ring.
    """

    def __init__(self, setup: Setup, seed: int = 0, greeds: Sequence[str] = GREEDS):
        self.setup = setup
        self.ranks = capacities(setup)
        self.resets, self.is_emptied = 0, False
        self._choices = functools.cache(
            lambda resets: Choices(self.ranks, setup.replicas, seed + resets, greeds)
        )
        self._read_after: dict[int, int] = {}
        """Resets before what is cached was read, by number."""
        self.belongs: dict[str, tuple[str | None, int]] = {}
        self._belongs_to: dict[int, tuple[str | None, int]] = {}
        """Salt and adapter of what is cached, by number."""
        self._evicted_as: dict[int, tuple[Any, ...]] = {}
        """What was read of each cached prefix, and how it was evicted."""
        self.blocks: set[int] = set()
        self.live: dict[str, Resident] = {}
        self.ring: set[str] = set()
        self.cached: dict[int, list[np.ndarray]] = {}
        self._parents: dict[int, int | None] = {}
        self._first: dict[int, list[np.ndarray]] = {}
        """Of each cached prefix, by rank, columns of each row before its own."""
        self.filled = 0
        self.segments: dict[int, list[int | None]] = {}
        self.tails: dict[int, TailRows] = {}
        self.hits = self.shares = self.taken = 0
        self.dropped: list[int] = []
        self.most_rounds = 1
        self.evictions: list[tuple[str, int, int]] = []
        self.peak_pages = [0] * len(setup.shapes)
        self.most_reserved = 0
        self.tamper: Callable[[Report], Report] = lambda report: report

    def choices_of(self, resident: Resident) -> Choices:
        """What a request keeps."""
        return self._choices(resident.resets)

    def pages(self, kv_len: np.ndarray) -> int:
        """Pages of rows of these lengths."""
        return int((-(-kv_len // PAGE)).sum())

    def held(self, rank: int) -> int:
        """Pages held on a rank."""
        return self._held(rank, self._rows(rank))

    def _held(self, rank: int, rows: np.ndarray) -> int:
        lent = sum(int(r.lent[rank].sum()) for r in self.live.values() if r.lent is not None)
        cached = self.cached_pages(rank) + self.segment_pages(rank) + self.tail_pages(rank)
        return self.pages(rows) - lent + cached

    def tail_pages(self, rank: int) -> int:
        """Pages of a rank that tails hold."""
        return sum(self._tail_pages(number, rank) for number in self.tails)

    def _tail_pages(self, number: int, rank: int) -> int:
        """Pages of a rank that a tail holds."""
        tail = self.tails[number]
        return self.pages(tail.kv_len[rank]) - int(self._lent_by(tail.prefix)[rank].sum())

    def _rows(self, rank: int) -> np.ndarray:
        """Row lengths on a rank, [requests, rows]."""
        rows = [resident.kv_len[rank] for resident in self.live.values()]
        return np.array(rows, np.int64).reshape(len(rows), self.ranks[rank].rows)

    def cached_pages(self, rank: int) -> int:
        """Pages of a rank that cached prefixes hold."""
        return sum(self._cached_pages(number, rank) for number in self.cached)

    def _cached_pages(self, number: int, rank: int) -> int:
        """Pages of a rank that a cached prefix holds behind its parent."""
        return self.pages(self.cached[number][rank]) - int(self._first[number][rank].sum())

    def _lent_by(self, number: int | None) -> list[np.ndarray]:
        """Full pages of each row, by rank, of a cached prefix with its parents."""
        if number is None:
            return [np.zeros(shape, np.int64) for shape in self.setup.shapes]
        return [rows // PAGE for rows in self.cached[number]]

    def segment_pages(self, rank: int) -> int:
        """Pages of a rank that segments hold."""
        return sum(len(tokens) // PAGE for tokens in self.segments.values()) * self.ranks[rank].rows

    def borrowers(self, number: int) -> list[str]:
        """Requests that borrow a cached prefix."""
        return [name for name, resident in self.live.items() if resident.prefix == number]

    def _drop(self, number: int) -> None:
        """Drop a prefix, and what one request borrows of it becomes its own; or a segment, or a tail."""
        self.dropped.append(number)
        if number in self.tails:
            del self.tails[number]
            return
        if number in self.segments:
            users = [name for name, x in self.live.items() if number in dict(x.segments)]
            assert not users, f"segment {number} is dropped while {users} borrow it"
            del self.segments[number]
            return
        borrowers, parent = self.borrowers(number), self._parents.pop(number)
        assert number not in self._parents.values(), f"prefix {number} is dropped before one that follows it"
        followers = [tail for tail in self.tails.values() if tail.prefix == number]
        assert not followers, f"prefix {number} is dropped before a tail that follows it"
        before = self._first.pop(number)
        lends = any((rows != own).any() for rows, own in zip(self._lent_by(number), before, strict=True))
        assert len(borrowers) <= 1 or not lends, f"prefix {number} is dropped while {borrowers} borrow it"
        for name in borrowers:
            self.live[name].lent, self.live[name].prefix = before, parent
        del self.cached[number]

    def _store(self, resident: Resident) -> list[int]:
        """Cache what a request was evicted to, if that is asked for; it goes on as the first borrower.

        Returns:
            Pages of each rank of the prefix before it that it completes.
        """
        store, resident.store = resident.store, None
        filled = [np.zeros_like(rows) for rows in resident.kv_len]
        if store is not None and resident.is_at_end:
            number, first = store.number, resident.lent or self._lent_by(None)
            if store.fills is not None:
                filled = self._fill(store.fills, resident)
            self.cached[number] = [rows.copy() for rows in resident.kv_len]
            self._first[number] = [own + more for own, more in zip(first, filled, strict=True)]
            self._parents[number] = resident.prefix
            self._evicted_as[number] = resident.evicted_until(resident.tokens)
            self._note_origin(number, resident)
            self._borrow(resident, number)
        return [int(rows.sum()) for rows in filled]

    def _fill(self, number: int, resident: Resident) -> list[np.ndarray]:
        """Where a prefix takes a request's first full page for its partial one, which nobody may use beyond that."""
        before = self._lent_by(number)
        beyond = [self._first[child] for child, parent in self._parents.items() if parent == number]
        beyond += [other.lent for other in self.live.values() if other.prefix == number and other.lent]
        for used in beyond:
            for columns, lent in zip(used, before, strict=True):
                assert (columns == lent).all(), f"prefix {number} is filled twice"
        assert resident.prefix == number
        filled = []
        for rows, kept, lent in zip(resident.kv_len, self.cached[number], before, strict=True):
            filled.append(((kept % PAGE > 0) & (rows // PAGE > lent)).astype(np.int64))
        self.filled += sum(int(rows.sum()) for rows in filled)
        return filled

    def _borrow(self, resident: Resident, number: int) -> None:
        resident.prefix = number
        resident.lent = self._lent_by(number)

    def _freeze(self, resident: Resident, segments: Sequence[tuple[int, int]]) -> None:
        """Make segments of what a request has read, behind those that it borrows."""
        for number, columns in segments:
            assert number not in self.segments and number not in self.cached
            start, stop = resident.columns * PAGE, (resident.columns + columns) * PAGE
            rows, stored = resident.kv_len, resident.tokens
            if resident.pinned is not None and resident.plan.prompt is None:
                # Its prompt was kept whole, and is pinned.
                rows, stored = resident.pinned, resident.plan.answer.begins
            assert all((of_rank == stored).all() for of_rank in rows) and stop <= stored, "it was evicted"
            known: list[int | None] = [*resident.prompt[start:stop]]
            self.segments[number] = known + [None] * (stop - start - len(known))
            self._note_origin(number, resident)
            self._lend(resident, [*resident.segments, (number, columns)])

    def _leave(self, name: str, number: int, end: int) -> None:
        """Keep what an ended request holds behind its prefix, up to so many tokens, if nothing of that was evicted."""
        resident = self.live[name]
        assert resident.prefix is not None and number not in self.tails
        begins = len(self._evicted_as[resident.prefix][0])
        assert begins < end <= resident.tokens
        for rows, kept in zip(resident.kv_len, self.cached[resident.prefix], strict=True):
            assert (rows - kept.reshape(rows.shape) == resident.tokens - begins).all(), "it was evicted since"
        known: list[int | None] = [*resident.prompt[begins:end]]
        known += [None] * (end - begins - len(known))
        rows = [of_rank - (resident.tokens - end) for of_rank in resident.kv_len]
        self.tails[number] = TailRows(resident.prefix, rows, known)
        self._note_origin(number, resident)

    def _take(self, resident: Resident, number: int) -> None:
        """Begin a request with a tail, which has its own tokens and is its own from now on."""
        admission, tail = resident.admission, self.tails.pop(number)
        self._check_fresh(number, admission.request_id)
        assert tail.prefix == resident.prefix
        begins = len(self._evicted_as[tail.prefix][0])
        assert admission.tokens == begins + len(tail.tokens) < len(resident.prompt)
        for own, left in zip(resident.prompt[begins:], tail.tokens, strict=False):
            assert left in (own, None), "it begins with another request's tokens"
        resident.kv_len = [
            rows.reshape(own.shape) for rows, own in zip(tail.kv_len, resident.kv_len, strict=True)
        ]
        self.taken += 1

    def _lend(self, resident: Resident, segments: Sequence[tuple[int, int]]) -> None:
        resident.segments = list(segments)
        resident.lent = [np.full_like(rows, resident.columns) for rows in resident.kv_len]

    def _note_origin(self, number: int, resident: Resident) -> None:
        """Note when, and for whom, something was read that is cached now."""
        self._read_after[number] = resident.resets
        self._belongs_to[number] = self.belongs[resident.admission.request_id]

    def _check_fresh(self, number: int, name: str) -> None:
        """No request begins with what was read before the last reset, with another salt or by another adapter."""
        read_after = self._read_after[number]
        assert read_after == self.resets, f"{number} was read after {read_after} of {self.resets} resets"
        theirs, own = self._belongs_to[number], self.belongs[name]
        assert theirs == own, f"{name} of salt and adapter {own} begins with what was read for {theirs}"

    def _check_emptied(self) -> None:
        """After a reset that said so, nobody uses what was cached before it."""
        for name, resident in self.live.items() if self.is_emptied else ():
            uses = [resident.prefix, resident.store, *(number for number, _ in resident.segments)]
            assert uses == [None, None], f"{name} uses {uses}, and the reset said that nobody does"
        self.is_emptied = False

    def _share(self, resident: Resident) -> None:
        """Begin a request with segments, which have its own tokens."""
        admission, tokens = resident.admission, []
        for number, columns in admission.segments:
            self._check_fresh(number, admission.request_id)
            assert 0 < columns * PAGE <= len(self.segments[number])
            tokens += self.segments[number][: columns * PAGE]
        assert len(tokens) == admission.tokens < len(resident.prompt)
        for own, shared in zip(resident.prompt, tokens, strict=False):
            assert shared in (own, None), "it begins with another request's tokens"
        for rows in resident.kv_len:
            rows += admission.tokens
        resident.tokens = admission.tokens
        self._lend(resident, admission.segments)
        self.shares += 1

    def _open(self, admission: Admission) -> Resident:
        """Open a request, with what its cached prefix holds if it has one."""
        rows = [np.zeros(shape, dtype=np.int64) for shape in self.setup.shapes]
        if not admission.prefixes:
            return Resident(admission, rows, resets=self.resets)
        for parent, number in itertools.pairwise([None, *admission.prefixes]):
            assert self._parents[number] == parent, f"prefix {number} does not follow {parent}"
            self._check_fresh(number, admission.request_id)
        rows = [kept.copy() for kept in self.cached[number]]
        tokens = admission.tokens
        repeated = len(self._evicted_as[number][0])
        resident = Resident(admission, rows, tokens, repeated=repeated, resets=self.resets)
        self._borrow(resident, number)
        self.hits += 1
        return resident

    def execute(self, output: SchedulerOutput) -> WorkerMessages:
        """Carry out a step.

        Returns:
            What every rank reports of it.
        """
        message = output.kv_connector_metadata
        extra: ExtraTokens | None = message.extra
        freezes = dict(message.freezes)
        for name in output.finished_req_ids:
            if name in self.live:
                self._freeze(self.live[name], freezes.pop(name, ()))
        for name, left in message.leaves.items():
            assert name in output.finished_req_ids
            self._leave(name, *left)
        for name in [*output.finished_req_ids, *(output.preempted_req_ids or ())]:
            self.live.pop(name, None)
            self.ring.discard(name)
        self._take_back_drafts(output)
        for number, count in message.cuts.items():
            self.tails[number].cut(count)
        for number in message.drops:
            self._drop(number)
        self._check_emptied()
        self._move_blocks(output)
        self._check_adapters(output)
        trimmed: list[Resident] = []
        asked: dict[str, CutQuery] = {}
        reports = []
        for name, answer in message.answers.items():
            resident = self.live.get(name)
            if resident is None or resident.admission.epoch != answer.epoch:
                continue
            assert resident.waits
            if isinstance(answer.said, CutQuery):
                asked[name] = answer.said
                self.most_rounds = max(self.most_rounds, answer.said.known + 1)
                continue
            resident.waits = False
            self.ring.discard(name)
            trimmed.append(resident)
            reports.append(self._trim(resident, answer.said))
        for admission in message.admissions:
            name = admission.request_id
            assert name not in self.live, f"{name} was admitted while it was running"
            self.live[name] = self._open(admission)
        for new in output.scheduled_new_reqs:
            if new.req_id in self.live:
                self.live[new.req_id].prompt = list(new.prefill_token_ids or new.prompt_token_ids)
        for admission in message.admissions:
            resident = self.live[admission.request_id]
            resumed = output.scheduled_cached_reqs.all_token_ids.get(admission.request_id, ())
            resident.prompt = resident.prompt or list(resumed)
            if admission.segments:
                self._share(resident)
            if resident.prefix is not None:
                evicted = self._evicted_as[resident.prefix]
                own = resident.evicted_until(len(evicted[0]))
                assert evicted == own, "it begins with another request's prefix"
                if admission.tail is not None:
                    self._take(resident, admission.tail)
                else:
                    assert admission.tokens == len(evicted[0])
        for name, store in message.stores.items():
            self.live[name].store = store
        self._check_reserve(output)
        leaving: list[Resident] = []
        # Pages that are held for a part of the step only.
        passing = [0] * len(self.ranks)
        for name, count in output.num_scheduled_tokens.items():
            if extra is not None and name == extra.name:
                resident = self.live[extra.request_id]
                for rank, pages in enumerate(self._pages_of_extra(resident, extra, count)):
                    passing[rank] += pages
                if resident.repeats_part and extra.stop == resident.tokens:
                    leaving.append(resident)
                continue
            resident = self.live[name]
            assert not resident.waits, (
                f"{name} goes on before its layer budgets are known, or its prompt is repeated"
            )
            before, resident.tokens = resident.tokens, resident.tokens + count
            position = resident.plan.next_eviction(before)
            self._keep_queries(name, resident, before)
            for rows in resident.kv_len:
                rows += count
            self._freeze(resident, freezes.pop(name, ()))
            if position is None:
                continue
            assert position >= resident.tokens, f"a chunk of {name} crosses its eviction position"
            if resident.is_repeated_now:
                resident.waits, resident.repeated = True, resident.part.begins
            elif resident.tokens == position:
                if resident.is_at_end and resident.repeats_part:
                    assert resident.repeated == resident.part.repeated_at, f"{name} was not repeated"
                leaving.append(resident)
                is_probed = extra is not None and extra.request_id == name
                assert (extra_tokens(resident, position) > 0) == is_probed
            if resident.admission.by_layer and not before:
                assert (before, resident.tokens) == (0, position) and resident.is_at_end
                resident.kept = self._choose(resident)
                for rank, peak in enumerate(self._recycled_peak(resident)):
                    passing[rank] += peak - self.pages(resident.kv_len[rank])
        assert not freezes, f"{list(freezes)} have no pages in this step"
        for resident in leaving:
            if resident.segments and resident.is_at_end:
                # Copies of what it keeps are made before its own pages are freed.
                resident.kept = self._choose(resident)
                for rank, kept in enumerate(resident.kept):
                    passing[rank] += self.pages(kept)
        # The step's pages are all taken before anything is freed by its evictions.
        for rank, pages in enumerate(self._room()):
            held = self.held(rank) + passing[rank]
            assert held <= pages, f"rank {rank} would hold {held} of {pages} pages"
            most = message.most_pages
            assert held <= most[rank], f"rank {rank} would hold {held} pages, the ledger allows {most[rank]}"
            self.peak_pages[rank] = max(self.peak_pages[rank], held)
        for resident in leaving:
            if self.setup.pipeline and resident.is_at_end and schedule(resident) in CROSS_STAGE:
                resident.waits = True
                asked[resident.admission.request_id] = CutQuery()
        leaving = [resident for resident in leaving if not resident.waits]
        # Those whose phase goes on keep their part of the ring.
        self.ring -= {x.admission.request_id for x in leaving if x.is_at_end}
        reports += [self._evict(resident) for resident in leaving]
        by_rank = {}
        for rank in range(len(self.setup.shapes)):
            told: dict[str, list[Report]] = {}
            for resident, of_ranks in zip(trimmed + leaving, reports, strict=True):
                told.setdefault(resident.admission.request_id, []).append(self.tamper(of_ranks[rank]))
            claims = {name: self._claim(self.live[name], question, rank) for name, question in asked.items()}
            by_rank[rank] = self._message(rank, told, claims)
            held, most = by_rank[rank].physical_pages, message.most_pages[rank]
            assert held <= most, f"rank {rank} holds {held} pages, the ledger allows {most}"
        return WorkerMessages(by_rank)

    def _keep_queries(self, name: str, resident: Resident, before: int) -> None:
        """Whose next eviction chooses by queries of a step's tokens has a part of the ring from then on."""
        phase = resident.plan.phase_at(before)
        if phase is None or not phase.keeps_queries:
            return
        position = phase.next_complete(before)
        if resident.tokens > position - phase.window:
            self.ring.add(name)
            assert len(self.ring) <= self.setup.ring_parts, f"the ring has no part for {name}"
        first = resident.admission.tokens
        assert first <= position - phase.window, f"{name} begins with {first} tokens, and needs their queries"

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Blocks become pages and back: what remains has room for what is held, and other layers get none of it."""
        message = output.kv_connector_metadata
        assert self.blocks.isdisjoint(message.new_blocks) and self.blocks.issuperset(message.lost_blocks)
        self.blocks = self.blocks.union(message.new_blocks).difference(message.lost_blocks)
        if not self.setup.has_other_layers:
            return
        for rank, room in enumerate(self._room()):
            assert self.held(rank) <= room, f"rank {rank} holds {self.held(rank)} pages, but has {room}"
        tables = [new.block_ids for new in output.scheduled_new_reqs]
        tables += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids is not None]
        given = {block for table in tables for ids in table for block in ids}
        assert self.blocks.isdisjoint(given), "other layers got blocks that are pages"

    def _room(self) -> list[int]:
        """Pages of each rank that there are."""
        if not self.setup.has_other_layers:
            return list(self.setup.pages)
        return [len(self.blocks) * rank.rows for rank in self.ranks]

    def _check_adapters(self, output: SchedulerOutput) -> None:
        """A step computes no more adapters than there is room for."""
        message = output.kv_connector_metadata
        rows = {message.extra.name: message.extra.request_id} if message.extra else {}
        used = {self.belongs[rows.get(name, name)][1] for name in output.num_scheduled_tokens} - {0}
        assert len(used) <= self.setup.adapters, (
            f"a step uses adapters {used}, and may use {self.setup.adapters}"
        )

    def _take_back_drafts(self, output: SchedulerOutput) -> None:
        """Forget the rejected draft tokens of requests that go on."""
        scheduled = output.scheduled_cached_reqs
        admitted = {admission.request_id for admission in output.kv_connector_metadata.admissions}
        for name, computed in zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True):
            resident = self.live.get(name)
            if resident is None or name in admitted:
                continue
            for rows in resident.kv_len:
                rows -= resident.tokens - computed
            resident.tokens = computed

    def _message(self, rank: int, reports: dict[str, list[Report]], claims: dict[str, Claim]) -> RankMessage:
        """What a rank says at the end of a step."""
        rows = self._rows(rank)
        pages = (-(-rows // PAGE)).sum(1).tolist()
        requests = {
            name: (resident.admission.epoch, resident.tokens, held)
            for (name, resident), held in zip(self.live.items(), pages, strict=True)
        }
        prefixes = {number: self._cached_pages(number, rank) for number in self.cached}
        rows_of_rank = self.ranks[rank].rows
        segments = {number: len(x) // PAGE * rows_of_rank for number, x in self.segments.items()}
        uncompressed = segments | {number: self._tail_pages(number, rank) for number in self.tails}
        return RankMessage(
            reports,
            claims,
            physical_pages=self._held(rank, rows),
            cached_pages=sum(prefixes.values()),
            uncompressed_pages=sum(uncompressed.values()),
            logical_tokens=int(rows.sum()),
            holdings=Holdings(requests, prefixes | uncompressed),
        )

    @functools.cached_property
    def _reserve_size(self) -> int:
        return options_of(self.setup).reserve_size(self.setup.max_model_len, DIMS)

    def _check_reserve(self, output: SchedulerOutput) -> None:
        """Whoever sums up attention has a place of its own for it until its eviction, which this step may bring; but
        not who is read and evicted in this one step."""
        spans = []
        for name, resident in self.live.items():
            count = output.num_scheduled_tokens.get(name, 0)
            if not (count or resident.tokens) or not resident.plan.reserved(DIMS) or not resident.needs_sums:
                continue
            in_one_step = not resident.tokens and resident.plan.is_read_by(count)
            if in_one_step and not resident.repeats_prompt:
                assert resident.admission.reserved_at is None
                continue
            assert resident.admission.reserved_at is not None, f"{name} has no place for its sums"
            spans.append((resident.admission.reserved_at, resident.plan.reserved(DIMS)))
        spans.sort()
        end = 0
        for start, size in spans:
            assert start >= end, "two requests write to one place of the reserve"
            end = start + size
        assert end <= self._reserve_size, "it is too small"
        self.most_reserved = max(self.most_reserved, end)

    def _pages_of_extra(self, resident: Resident, extra: ExtraTokens, count: int) -> list[int]:
        """Pages of each rank that so many extra tokens hold for the step: of a probe, or of a repeat."""
        if not resident.repeats_part:
            assert resident.tokens in resident.plan.prompt.positions[:-1]
            assert count == extra.stop - extra.start == extra_tokens(resident, resident.tokens) > 0
            return [self.pages(rows + count) - self.pages(rows) for rows in resident.kv_len]
        self._repeat(resident, extra, count)
        params = resident.plan.config.params
        if params["kvzip_sees"] == "all":
            return [self.pages(rows + count) - self.pages(rows) for rows in resident.kv_len]
        stored = extra.stop - extra.start + count
        return [
            self.pages(np.full_like(rows, _seen_before(resident, extra, rows) + stored))
            for rows in resident.kv_len
        ]

    def _repeat(self, resident: Resident, chunk: ExtraTokens, count: int) -> None:
        """Repeat a chunk: the next one, once the prompt is read, and in no more rows than there is room for."""
        n, config = resident.part.repeated_at, resident.part.config
        assert resident.waits and resident.tokens == n
        assert chunk.start == resident.repeated < chunk.stop <= n
        assert chunk.stop - chunk.start <= count <= schedule_of(resident.part).most_extra_rows(config.params)
        assert n + count < self.setup.max_model_len
        resident.repeated = chunk.stop
        resident.waits = chunk.stop < n

    def _claim(self, resident: Resident, question: CutQuery, rank: int) -> Claim:
        """What a rank says of an eviction that it cannot decide alone."""
        if schedule(resident) != "by weight":
            first_replica = rank % self.setup.replicas == 0
            told = tally([self._keys(resident, rank)], question) if first_replica else NO_KEYS
            return Claim(resident.admission.epoch, told)
        room = self.ranks[rank]
        weights = self.choices_of(resident).weights(resident.admission.request_id)
        mine = weights[room.first_layer : room.first_layer + room.num_layers]
        return Claim(resident.admission.epoch, LayerWeights(room.first_layer, mine))

    def _keys(self, resident: Resident, rank: int) -> torch.Tensor:
        """Order keys of a rank's candidates: those that it keeps have the highest."""
        part = resident.part
        rows = self.choices_of(resident).lengths(resident.admission, part=part)[rank]
        window = part.config.window_for(part.n)
        best = int(rows.sum()) - rows.size * window
        # Ranks take turns above and below the cut, which lies between two digits or anywhere in one.
        places = torch.arange(rows.size * (part.n - window)) * len(self.ranks) + rank
        cut = CUTS[zlib.crc32(resident.admission.request_id.encode()) % len(CUTS)]
        return torch.cat([cut + places[:best], cut - 1 - places[best:]])

    def _evict(self, resident: Resident) -> list[Report]:
        """Keep what the policy may."""
        parts = self._choose(resident) if resident.kept is None else resident.kept
        resident.kept = None
        return self._keep(resident, parts)

    def _choose(self, resident: Resident) -> list[np.ndarray]:
        """Row lengths of each rank, [layers, KV heads]."""
        if resident.is_in_answer:
            return self._choose_of_answer(resident)
        config, n = resident.plan.config, resident.part.n
        if resident.is_repeated_now and not resident.is_at_end:
            return [rows.copy() for rows in resident.kv_len]  # until its lookahead is stored
        if schedule(resident) != "chunked":
            return self._behind_pinned(
                resident, self.choices_of(resident).lengths(resident.admission, part=resident.part)
            )
        parts = []
        for rank, rows in zip(self.ranks, resident.kv_len, strict=True):
            layers, last = range(rank.first_layer, rank.first_layer + rank.num_layers), resident.tokens == n
            budgets = [take.chunk_budget(config, n, layer, rank.num_model_layers, last) for layer in layers]
            parts.append(np.minimum(rows, np.array(budgets)[:, None]))
        return parts

    def _behind_pinned(self, resident: Resident, of_part: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What rows hold with that much of a part, behind what earlier parts have left."""
        pinned = [rows - resident.part.n for rows in resident.kv_len]
        return [before + own.reshape(before.shape) for before, own in zip(pinned, of_part, strict=True)]

    def _choose_of_answer(self, resident: Resident) -> list[np.ndarray]:
        """What is pinned and, of the answer, as many entries as its budget says on average: of any rows if they
        compete."""
        answer = resident.plan.answer
        assert answer is not None and answer.config.budget is not None
        if resident.pinned is None:
            since = resident.tokens - answer.begins
            resident.pinned = [rows - since for rows in resident.kv_len]
        budget, window = answer.config.budget, answer.window
        stored = [rows - pinned for rows, pinned in zip(resident.kv_len, resident.pinned, strict=True)]
        if not answer.config.heads_compete:
            kept = [np.full_like(rows, budget) for rows in stored]
            assert all((own <= rows).all() for own, rows in zip(kept, stored, strict=True))
        else:
            kept = self._competing(resident, stored, budget, window)
        return [pinned + own for pinned, own in zip(resident.pinned, kept, strict=True)]

    def _competing(
        self, resident: Resident, stored: Sequence[np.ndarray], budget: int, window: int
    ) -> list[np.ndarray]:
        """Entries that rows keep of an answer: in each layer heads, in any order, take all they may."""
        kept = [np.full_like(rows, window) for rows in stored]
        named = zlib.crc32(f"{resident.admission.request_id} {resident.resets}".encode())
        for layer in range(self.ranks[0].num_model_layers):
            ranks = [
                rank
                for rank, room in enumerate(self.ranks)
                if room.first_layer <= layer < room.first_layer + room.num_layers
            ]
            heads = [
                (rank, head)
                for rank in ranks[:: self.setup.replicas]
                for head in range(stored[rank].shape[1])
            ]
            random.Random(named + layer * (resident.tokens % 3)).shuffle(heads)
            left = len(heads) * (budget - window)
            for rank, head in heads:
                row = layer - self.ranks[rank].first_layer
                more = min(left, int(stored[rank][row, head]) - window)
                left -= more
                for replica in range(rank, rank + self.setup.replicas):
                    kept[replica][row, head] += more
            assert left == 0
        return kept

    def _recycled_peak(self, resident: Resident) -> list[int]:
        """The most pages that each rank holds while its layers are evicted one after the other."""
        assert resident.kept is not None
        peaks = [0] * len(self.ranks)
        for layer in range(max(room.num_layers for room in self.ranks)):
            below = resident.kept
            if schedule(resident) == "by weight":
                below = self.choices_of(resident).provisional(resident.admission, layer)
            for rank, (whole, kept) in enumerate(zip(resident.kv_len, below, strict=True)):
                if layer < len(whole):
                    peaks[rank] = max(peaks[rank], self.pages(kept[:layer]) + self.pages(whole[layer]))
        return peaks

    def _trim(self, resident: Resident, answer: Sequence[int] | int) -> list[Report]:
        """Keep what the scheduler decided, of each layer or of all together."""
        part = resident.part
        window = part.config.window_for(part.n)
        if isinstance(answer, int):
            kept = self.choices_of(resident).lengths(resident.admission, part=part)
            for rank, rows in enumerate(kept):
                best = int(rows.sum()) - rows.size * window
                assert int((self._keys(resident, rank) >= answer).sum()) == best
            return self._keep(resident, self._behind_pinned(resident, kept))
        past = part.config.budget_for(part.n) - window
        assert sum(answer) == self.ranks[0].num_model_layers * past
        kept = self.choices_of(resident).lengths(resident.admission, answer, part)
        return self._keep(resident, self._behind_pinned(resident, kept))

    def _keep(self, resident: Resident, parts: Sequence[np.ndarray]) -> list[Report]:
        """Shorten the rows of each rank to these lengths and report it."""
        plan = resident.plan
        admission = resident.admission
        self.evictions.append((admission.request_id, admission.epoch, resident.tokens))
        before_rows = [rows.tolist() for rows in resident.kv_len]
        if resident.segments and resident.is_at_end:
            resident.segments, resident.lent = [], None
        reports = []
        for rank, part in enumerate(parts):
            rows = resident.kv_len[rank]
            before = self.pages(rows)
            rows[:] = part.reshape(rows.shape)
            pages = self.pages(rows)
            reports.append(
                Report(
                    epoch=admission.epoch,
                    tokens=resident.tokens,
                    pages=pages,
                    residues=np.bincount(rows.ravel() % PAGE, minlength=PAGE).tolist(),
                    part=PartOfEviction(
                        plan.config.policy,
                        before - pages,
                        before,
                        0,
                        0,
                        rows.tolist(),
                        0.0,
                        0.0,
                        before_rows[rank] if resident.is_in_answer else None,
                    )
                    if plan.phase_of(resident.tokens)
                    else None,
                )
            )
        filled = self._store(resident)
        return [replace(report, filled=pages) for report, pages in zip(reports, filled, strict=True)]


class Simulation:
    """A scheduler and its workers, stepped as the engine core steps them.

    Attributes:
        outputs: tokens delivered by request id.
        reasons: why requests ended, by request id; of those that were aborted nothing is delivered.
        prefilled: tokens computed for prompts and replays so far.
        most_running: most requests ever running at once.
        preemptions: so far, by request id.
        accepted: draft tokens so far.
        stops: by request id, which of its tokens is the one that ends its answer.
    """

    def __init__(self, setup: Setup, seed: int = 0, greeds: Sequence[str] = GREEDS):
        self.setup = setup
        self.scheduler = make_scheduler(setup)
        self.workers = Workers(setup, seed, greeds) if setup.options is not None else None
        self.windows = WindowBlocks()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.preemptions: dict[str, int] = {}
        self.prefilled = 0
        self.most_running = 0
        self.steps = 0
        self.idle = 0
        self.accepted = 0
        self.stops: dict[str, int] = {}
        self._choose = random.Random(seed)

    @property
    def ledger(self) -> PageLedger:
        manager = self.scheduler.kv_cache_manager
        assert isinstance(manager, PageLedger)
        return manager

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = 0
        self.preemptions[request.request_id] = 0
        if self.workers is not None:
            adapter = request.lora_request.lora_int_id if request.lora_request else 0
            self.workers.belongs[request.request_id] = (request.cache_salt, adapter)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, hard: bool = False) -> bool:
        """Reset the cache, as if new weights were there from now on; whether nothing from before is in use.

        Args:
            hard: whether all that run are preempted before.
        """
        is_empty = self.scheduler.reset_prefix_cache(reset_running_requests=hard)
        if self.workers is not None:
            self.workers.resets += 1
            self.workers.is_emptied = is_empty
        return is_empty

    def step(self) -> SchedulerOutput:
        """Dispatch one step; take the oldest one's output once ``depth`` are in flight or nothing can be scheduled."""
        output = self.dispatch()
        if len(self.in_flight) >= self.setup.depth or not output.total_num_scheduled_tokens:
            self.deliver()
        return output

    def dispatch(self) -> SchedulerOutput:
        """Dispatch one step, whose output stays in flight."""
        self.steps += 1
        output = self.scheduler.schedule()
        for name in output.preempted_req_ids or ():
            self.preemptions[name] += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        # Under priorities a step may do nothing but preempt, and one may only carry answers or end a request that can
        # never fit; then the next must go on.
        ended = getattr(self.scheduler, "_ended", None)
        sends = (
            output.preempted_req_ids or ended or getattr(output.kv_connector_metadata, "answers", None)
        ) or getattr(output.kv_connector_metadata, "drops", None)
        self.idle = 0 if output.total_num_scheduled_tokens or sends else self.idle + 1
        if self.idle > self.setup.depth:
            unfinished = self.scheduler.get_num_unfinished_requests()
            assert not unfinished, f"hang: nothing is scheduled or in flight, {unfinished} requests wait"
        if self.workers is not None:
            self.windows.step(self.scheduler, output, self.workers.resets)
            check_repeat(self.scheduler, output)
        self.in_flight.append((output, self._execute(output)))
        return output

    def deliver(self) -> None:
        """Hand the scheduler the output of the oldest step in flight."""
        output, result = self.in_flight.popleft()
        self._stop(result)
        for engine_outputs in self.scheduler.update_from_output(output, result).values():
            for delivered in engine_outputs.outputs:
                self.outputs[delivered.request_id] += len(delivered.new_token_ids)
                if delivered.finish_reason is not None:
                    self.reasons[delivered.request_id] = str(delivered.finish_reason)
        self._draft(result)

    def _stop(self, result: ModelRunnerOutput) -> None:
        """Let the model end answers where it is to."""
        for name, sampled in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = self.scheduler.requests.get(name)
            if name in self.stops and request is not None:
                place = self.stops[name] - 1 - request.num_output_tokens
                if 0 <= place < len(sampled):
                    sampled[place] = STOP

    def _draft(self, result: ModelRunnerOutput) -> None:
        """Propose tokens for the next step of who was just given some."""
        names = [
            name for name, sampled in zip(result.req_ids, result.sampled_token_ids, strict=True) if sampled
        ]
        if self.setup.drafts:
            drafts = [[TOKEN] * self._choose.randint(0, self.setup.drafts) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _sample(self, output: SchedulerOutput, name: str) -> list[int]:
        """One token, and the drafts before it that are accepted."""
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        accepted = 0 if -1 in drafts else self._choose.randint(0, len(drafts))
        self.accepted += accepted
        return [TOKEN] * (accepted + 1)

    def run(self, max_steps: int) -> None:
        """Step until every request is finished and every output delivered."""
        limit = self.steps + max_steps
        while self.scheduler.has_requests():
            assert self.steps < limit, f"{self.scheduler.get_num_unfinished_requests()} requests unfinished"
            self.step()
        while self.in_flight:
            self.deliver()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is None:  # a probe
                sampled.append([])
                continue
            sampled.append([] if request.is_prefill_chunk else self._sample(output, name))
            if request.is_prefill_chunk or output.num_scheduled_tokens[name] > 1:
                self.prefilled += output.num_scheduled_tokens[name]
        message = None
        if self.workers is not None:
            message = KVConnectorOutput(kv_connector_worker_meta=self.workers.execute(output))
        return ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled, kv_connector_output=message
        )
