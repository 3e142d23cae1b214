"""The next step's message to the workers, as it comes about.

The outbox owns all that workers are still to be told: whoever changes something that they must hear of writes it here
at once. What was taken for a step is dispatched, and cannot be taken back.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_kvevict.engine.messages import StepMessage, StorePrefix
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.reports import ArbiterAnswer, ExtraTokens


@dataclass(frozen=True)
class TakenBack:
    """What the next step would have told of a request: whether it is admitted, whether its claims are answered,
    whether its prefix is cached, and numbers of the segments that are made of its pages."""

    is_admission: bool
    is_answer: bool
    is_store: bool
    segments: tuple[int, ...]


class Outbox:
    """What the next step tells."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._begin()

    def _begin(self) -> None:
        self._admissions: dict[str, Admission] = {}
        self._rest = StepMessage()
        """All else but blocks, which may still change hands again."""
        self._new_blocks: dict[int, None] = {}
        self._lost_blocks: dict[int, None] = {}

    @property
    def admitted(self) -> Mapping[str, Admission]:
        """The admissions of the step, by request id."""
        return self._admissions

    @property
    def answered(self) -> Collection[str]:
        """Ids of the requests whose claims are answered."""
        return self._rest.answers.keys()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell so far."""
        blocks = self._new_blocks or self._lost_blocks
        return not (self._admissions or blocks) and self._rest == StepMessage()

    @property
    def has_drops(self) -> bool:
        """Whether something is to be dropped, which is a reason for a step."""
        return bool(self._rest.drops)

    def new_number(self) -> int:
        """What scheduler and workers call the next shared entry; nothing else there has the number."""
        return next(self._numbers)

    def admit(self, admission: Admission) -> None:
        """The step admits a request."""
        self._admissions[admission.request_id] = admission

    def answer(self, request_id: str, answer: ArbiterAnswer) -> None:
        """Answer what all ranks claimed of a request's eviction."""
        self._rest.answers[request_id] = answer

    def store(self, request_id: str, store: StorePrefix) -> None:
        """The step evicts a request, and what it keeps is cached."""
        self._rest.stores[request_id] = store

    def freeze(self, request_id: str, number: int, columns: int) -> None:
        """The step makes a segment of a request's next columns."""
        self._rest.freezes.setdefault(request_id, []).append((number, columns))

    def publish_tail(self, request_id: str, number: int, tokens: int) -> None:
        """A request has ended, and its tail stays, up to so many tokens of its prompt and answer."""
        self._rest.leaves[request_id] = number, tokens

    def cut(self, number: int, tokens: int) -> None:
        """A tail loses its last tokens before the step."""
        self._rest.cuts[number] = self._rest.cuts.get(number, 0) + tokens

    def drop(self, number: int) -> None:
        """A compressed prefix, a tail or a segment is dropped before the step."""
        self._rest.drops.append(number)

    def blocks_become_pages(self, blocks: Iterable[int]) -> None:
        """Blocks of vLLM's are pages from the step on."""
        _note(blocks, self._lost_blocks, self._new_blocks)

    def blocks_are_lost(self, blocks: Iterable[int]) -> None:
        """Blocks of vLLM's are no pages any more from the step on."""
        _note(blocks, self._new_blocks, self._lost_blocks)

    def take_back(self, request_id: str) -> TakenBack:
        """Tell nothing of a request, which is gone."""
        return TakenBack(
            self._admissions.pop(request_id, None) is not None,
            self._rest.answers.pop(request_id, None) is not None,
            self._rest.stores.pop(request_id, None) is not None,
            tuple(number for number, _ in self._rest.freezes.pop(request_id, ())),
        )

    def flush(self, extra: ExtraTokens | None, most_pages: dict[int, int] | None) -> StepMessage:
        """The message of the step that was scheduled; from now on the next one's comes about.

        Args:
            extra: tokens that the step computes besides.
            most_pages: what each rank may hold, in check mode.
        """
        message = replace(
            self._rest,
            admissions=list(self._admissions.values()),
            new_blocks=list(self._new_blocks),
            lost_blocks=list(self._lost_blocks),
            extra=extra,
            most_pages=most_pages,
        )
        self._begin()
        return message


def _note(blocks: Iterable[int], undone: dict[int, None], done: dict[int, None]) -> None:
    """Note that blocks changed hands; what comes back within a step has not."""
    for block in blocks:
        if block in undone:
            del undone[block]
        else:
            done[block] = None
