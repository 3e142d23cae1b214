"""What happens to a request: in which phases it is evicted, when, and how.

Owns nothing: a plan has no state, and is equal in every process, since it follows from configuration and length alone.
"""

import bisect
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.inputs import Q_WINDOW
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules import inputs


def needs_reserve(policy: str) -> bool:
    """Whether requests of a policy hold so much beside their KV that workers keep a reserve for it."""
    return bool(inputs.shapes(lookup(policy).needs, 1, 1))


@dataclass(frozen=True)
class Phase:
    """A part of a request's tokens, and when and how it is evicted while these are stored.

        tokens   0 ----- position ----- end ------- end ------------- position ----- position ----- ...
                 |  a prompt's phase    |  another  |   an answer's, if it is evicted as well

    A prompt has one phase; several where it is evicted part by part, each beside what is left of those before.

    Attributes:
        config: the policy and its parameters.
        schedule: name of the schedule that evicts.
        positions: numbers of tokens after which it is evicted, ascending. An answer's may be a range that never ends.
        begins: tokens that the request has stored when the phase begins, 0 for a prompt's first.
        probe: tokens that a step which reaches a position before the last one computes as well, to choose by them.
        most_cached: the most tokens that the request may begin with which an earlier one has left uncompressed.
        leaves_at: tokens that stay uncompressed for others once they are read; 0 where others would read them
            differently.
        pins: whether all that is stored when it begins stays, and evictions choose among later tokens alone.
        of_answer: whether an answer is evicted, each of whose positions completes an eviction.
        after_step: whether evictions follow the step that reaches a position, by queries kept from step to step if the
            policy reads any; else they are part of its forward pass.
    """

    config: EvictionConfig
    schedule: str
    positions: Sequence[int]
    begins: int = 0
    probe: int = 0
    most_cached: int = 0
    leaves_at: int = 0
    pins: bool = False
    of_answer: bool = False
    after_step: bool = False

    @functools.cached_property
    def end(self) -> int:
        """Tokens after which it is evicted for the last time."""
        return self.positions[-1]

    @property
    def repeated_at(self) -> int:
        """Of a prompt that the model repeats before it is evicted: tokens after which it does, the prompt's own."""
        return self.positions[0]

    @property
    def is_after_lookahead(self) -> bool:
        """Whether a prompt is evicted once its answer has begun."""
        return self.after_step and not self.of_answer

    @property
    def name(self) -> str:
        """What its evictions are called where they are counted."""
        if self.of_answer:
            return "decode"
        return "lookahead" if self.after_step else "prefill"

    @property
    def n(self) -> int:
        """Of a prompt: the phase's tokens, which compete; the papers' n."""
        return self.end - self.begins

    @property
    def is_of_prompt(self) -> bool:
        """Whether a prompt, or a part of one, is evicted."""
        return not self.of_answer and (self.pins or not self.begins)

    @functools.cached_property
    def window(self) -> int:
        """Last tokens before an eviction that follows a step: they stay, and their queries choose, where the policy
        reads any."""
        assert self.config.budget is not None
        return self.config.window_for(self.config.budget)

    @functools.cached_property
    def keeps_queries(self) -> bool:
        """Whether queries are kept from step to step for its evictions."""
        return self.after_step and Q_WINDOW in self.config.inputs

    @property
    def interval(self) -> int:
        """Of an answer: tokens from one eviction to the next."""
        return self.positions[1] - self.positions[0]

    @property
    def most_lookahead(self) -> int:
        """Of an answer: its first tokens that may be awaited before the prompt's eviction, so that its own comes later
        and no query is kept for both."""
        return self.positions[0] - self.begins - max(1, self.window)

    @property
    def evictions(self) -> Sequence[int]:
        """Positions with which an eviction is complete: a prompt's with the last one, an answer's with each."""
        return self.positions if self.of_answer else (self.end,)

    def next_eviction(self, tokens: int) -> int:
        """The first position after ``tokens`` tokens, which are fewer than ``end``."""
        return self.positions[self._passed(tokens)]

    def next_complete(self, tokens: int) -> int:
        """The first of :attr:`evictions` after so many tokens."""
        return self.next_eviction(tokens) if self.of_answer else self.end

    def last_eviction(self, tokens: int) -> int | None:
        """The last position up to ``tokens`` tokens, None if there is none."""
        passed = self._passed(tokens)
        return self.positions[passed - 1] if passed else None

    def _passed(self, tokens: int) -> int:
        """How many positions there are up to ``tokens`` tokens."""
        positions = self.positions
        if isinstance(positions, range):  # asked of every answer in every step, and this one has no end
            return max(0, (tokens - positions.start) // positions.step + 1)
        return bisect.bisect_right(positions, tokens)

    def entries_at(self, tokens: int) -> int:
        """Entries of its own tokens that each row holds on average, of a phase that pins what came before."""
        last, budget = self.last_eviction(tokens), self.config.budget
        assert budget is not None
        return tokens - self.begins if last is None else budget + tokens - last

    def extra_tokens(self, position: int) -> int:
        """Tokens that a step which ends at ``position`` computes as well, only to choose by them."""
        return self.probe if self.probe and position < self.end and position in self.positions else 0


def answer_phase(config: EvictionConfig, interval: int, begins: int) -> Phase:
    """The phase of an answer that is evicted again and again.

    Args:
        config: whose budget is D, the entries of the answer that each KV head keeps on average.
        interval: tokens from one eviction to the next.
        begins: tokens of the prompt.
    """
    assert config.budget is not None
    return Phase(
        config,
        "decoding",
        range(begins + config.budget + interval, sys.maxsize, interval),
        begins=begins,
        most_cached=begins,
        # What is borrowed is not moved, so nothing that may be evicted later is left while the request runs.
        leaves_at=begins,
        pins=True,
        of_answer=True,
        after_step=True,
    )


def whole_phase(end: int) -> Phase:
    """The phase of a prompt's first part that stays whole, up to so many tokens."""
    return Phase(EvictionConfig("full"), "kept whole", (end,))


def part_phases(
    config: EvictionConfig,
    schedule: str,
    ends: Iterable[int],
    least: int,
    most_cached: Callable[[EvictionConfig, int], int],
    whole: int = 0,
) -> tuple[Phase, ...]:
    """The phases of a prompt that is evicted part by part: of each part its own tokens compete, by its own budget.

    What a part keeps depends on nothing behind it, so whoever goes on with the same tokens may begin with that.

    Args:
        schedule: the name of the policy's.
        ends: numbers of tokens after which a part may end, ascending.
        least: tokens of a part; a shorter one ends with the next that is long enough.
        most_cached: tokens of a part of so many that may have been left uncompressed; the first one reads all of it.
        whole: tokens at the front that stay whole, as a part of their own; 0 for none.
    """
    phases = [whole_phase(whole)] if whole else []
    for end in ends:
        begins = phases[-1].end if phases else 0
        n = end - begins
        if n >= least and config.evicts(n):
            part = config.for_part(n, begins)
            most = begins + most_cached(part, n) if begins else 0
            phases.append(Phase(part, schedule, (end,), begins=begins, most_cached=most, pins=begins > 0))
    return tuple(phases)


@dataclass(frozen=True)
class Plan:
    """When and how a request is evicted. It follows from its configuration and its length, in every process alike.

    Attributes:
        config: the policy and its parameters, also where nothing is evicted.
        phases: in which it is evicted, one after the other; none when it is kept whole.
        in_turns: whether it is a turn of a conversation, and the next one begins with all of it.
    """

    config: EvictionConfig
    phases: tuple[Phase, ...] = ()
    in_turns: bool = False

    @functools.cached_property
    def parts(self) -> tuple[Phase, ...]:
        """The phases in which its prompt, or a prefix of it, is evicted; none when that is kept whole."""
        return tuple(phase for phase in self.phases if phase.is_of_prompt)

    @functools.cached_property
    def prompt(self) -> Phase | None:
        """The first of these; the only one, unless the prompt is evicted part by part."""
        return self.parts[0] if self.parts else None

    @functools.cached_property
    def keeps_all(self) -> bool:
        """Whether nothing of its prompt goes: it has no parts, or one that stays whole."""
        return not any(part.config.evicts(part.n) for part in self.parts)

    @functools.cached_property
    def evicted_at(self) -> int:
        """Tokens after which its prompt is evicted, for the last time; 0 when it is kept whole."""
        return self.parts[-1].end if self.parts else 0

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        """Of its phases, ascending."""
        return tuple(phase.end for phase in self.phases)

    def unevicted_at(self, tokens: int) -> int:
        """Entries that each row holds on average of tokens that no eviction of the prompt has chosen among."""
        if self.answer is not None and self.answer.last_eviction(tokens) is not None:
            return self.answer.begins - self.evicted_at + self.answer.entries_at(tokens)
        return tokens - max((part.end for part in self.parts if part.end <= tokens), default=0)

    def part_of(self, token: int) -> Phase:
        """The phase of a token of the prompt that is evicted."""
        return next(phase for phase in self.parts if phase.begins <= token < phase.end)

    @functools.cached_property
    def answer(self) -> Phase | None:
        """The phase in which its answer is evicted again and again, beside a pinned prompt; None if that is kept."""
        return self.phases[-1] if self.phases and self.phases[-1].of_answer else None

    def phase_at(self, tokens: int) -> Phase | None:
        """The phase of the next eviction after ``tokens`` tokens, None when there is none."""
        passed = bisect.bisect_right(self._ends, tokens)
        return self.phases[passed] if passed < len(self.phases) else None

    def next_eviction(self, tokens: int) -> int | None:
        """The first position of an eviction after ``tokens`` tokens, None when there is none."""
        phase = self.phase_at(tokens)
        return None if phase is None else phase.next_eviction(tokens)

    def grows_until(self, tokens: int, later: int) -> int:
        """Up to how many tokens, ``later`` at most, each token adds an entry to each row: none is evicted before."""
        position = self.next_eviction(tokens)
        return later if position is None else min(position, later)

    def phase_of(self, position: int) -> Phase | None:
        """The phase in which an eviction is complete with a position (:attr:`Phase.evictions`), None if none is."""
        index = bisect.bisect_left(self._ends, position)
        if index == len(self.phases) or position not in self.phases[index].evictions:
            return None
        return self.phases[index]

    def reserved(self, dims: inputs.HeadDims, in_one_step: bool = False) -> int:
        """What its prompt takes of the workers' reserve until it is evicted: numbers for each layer and query head.

        Args:
            in_one_step: whether one step reads all up to its eviction: it scores by the queries themselves.
        """
        return max(
            (inputs.size(part.config.inputs, part.n, dims, in_one_step) for part in self.parts), default=0
        )

    def keeps_queries(self, last_token: int, tokens: int = 0) -> bool:
        """Whether the workers keep queries of an answer that ends there: some that choose are stored at all.

        Args:
            tokens: that it has so far; queries that have chosen are not kept.
        """
        keeping = (phase for phase in self.phases if phase.keeps_queries and tokens < phase.end)
        return any(last_token > phase.evictions[0] - phase.window for phase in keeping)

    def is_read_by(self, tokens: int) -> bool:
        """Whether a first step of so many tokens ends where the prompt is evicted, which it is only once."""
        return len(self.parts) == 1 and self.parts[0].end == tokens

    def most_cached(self, tokens: int, begins: int = 0) -> int:
        """The most tokens that a request may begin with which an earlier one has left uncompressed.

        The last one is computed in any case, and those whose queries choose: queries are not stored.

        Args:
            tokens: to be read.
            begins: those at the front that it begins with compressed.
        """
        phase = self.phase_at(begins)
        return tokens - 1 if phase is None else min(tokens - 1, phase.most_cached)

    def leaves(self, tokens: int) -> int:
        """Tokens that a request leaves uncompressed for others once so many are read."""
        return min(tokens, self.phases[0].leaves_at) if self.phases else tokens

    def leaves_at_end(self, tokens: int) -> int:
        """Tokens that a request leaves uncompressed when it ends, of so many."""
        first = self.phases[0] if self.phases else None
        is_whole = first is None or (first.of_answer and tokens < first.positions[0])
        return tokens if is_whole else self.leaves(tokens)


@dataclass(frozen=True)
class Admission:
    """One admission of one request, as the scheduler tells it to every worker.

    Attributes:
        request_id: vLLM's internal request id.
        epoch: 1 for the first admission, +1 after each preemption.
        plan: the request's, the same in each of its admissions.
        by_layer: whether its first step evicts it, layer by layer, each layer into the pages of the one before.
        reserved_at: where in the workers' reserve its place begins; None if it needs none.
        prefixes: numbers of the compressed prefixes that it begins with, each behind the one before; what they have
            was evicted already.
        tail: number of the tail that it takes behind these; None for none.
        segments: number of each segment that it begins with, which are not, and how many columns of it.
        tokens: those in either, which it has stored from the start.
    """

    request_id: str
    epoch: int
    plan: Plan
    by_layer: bool = False
    reserved_at: int | None = None
    prefixes: tuple[int, ...] = ()
    tail: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
