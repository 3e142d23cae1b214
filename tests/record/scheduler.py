"""vLLM's real scheduler with the ledger, against simulated workers: a line for each step."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.v1.core.sched.output import SchedulerOutput

from tests.engine.support import hostile_loads, loads
from tests.engine.support.loads import Load
from tests.engine.support.loads_in_turns import CONVERSATIONS, with_turns
from tests.engine.support.simulation import Simulation
from vllm_kvevict.policies.cuts import CutQuery
from vllm_kvevict.schedules.plan import Admission, Plan
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.schedules.reports import ArbiterAnswer

SEEDS = 16
TAKE = {"take_chunk": 128, "take_probe": 16, "take_warmup_layers": 1}

Record = dict[str, list[str]]
"""By run, its lines."""


# Loads.


def any_server(seed: int) -> Load:
    """A load whose server is of a kind that depends on the seed."""
    return (loads.mixed, loads.staged, loads.tight)[seed % 3](seed)


def taking(seed: int) -> Load:
    """A mixed load whose prompts are evicted chunk by chunk."""
    return loads.with_policy(loads.mixed(seed), "take", budget=(48, 0.3)[seed % 2], **TAKE)


def repeating(seed: int) -> Load:
    """A load whose prompts are repeated."""
    return loads.repeated(any_server(seed), seed, budget=64)


def in_turns(seed: int) -> Load:
    """A load whose prompts are evicted turn by turn; every fourth server repeats them."""
    load = with_turns(any_server(seed), seed)
    return loads.repeated(load, seed) if seed % 4 == 3 else load


def in_conversations(seed: int) -> Load:
    """A load of conversations that go on and branch; every fourth server repeats prompts."""
    kinds = tuple(CONVERSATIONS.values())
    load = kinds[seed % 3](seed)
    return loads.repeated(load, seed) if seed % 4 == 3 else load


def simulated(load: Load, seed: int) -> None:
    """Play a load of :mod:`tests.engine.support.loads`."""
    is_repeated = (load.setup.options or {}).get("policy") == "kvzip"
    loads.play(load, seed, repeats=is_repeated)


def hostile(*kinds: str) -> Callable[[int], Load]:
    """Hostile loads of some kinds."""
    return lambda seed: hostile_loads.load_of(seed, kinds)


def play_hostile(load: Load, seed: int) -> None:
    """Play a load of :mod:`tests.engine.support.hostile_loads`."""
    outcome = hostile_loads.play(load, seed)
    assert outcome.failure is None, outcome.failure


Play = Callable[[Load, int], None]
MIXES: dict[str, tuple[Callable[[int], Load], Play]] = {
    "mixed": (loads.mixed, simulated),
    "staged": (loads.staged, simulated),
    "tight": (loads.tight, simulated),
    "take": (taking, simulated),
    "repeats": (repeating, simulated),
    "prefixes": (hostile("resets"), play_hostile),
    "salts": (hostile("salts"), play_hostile),
    "drafts": (hostile("drafts"), play_hostile),
    "layers": (hostile("layers"), play_hostile),
    "adapters": (hostile("adapters"), play_hostile),
    "pauses": (hostile("pauses"), play_hostile),
    "turns": (in_turns, simulated),
    "conversations": (in_conversations, simulated),
    "answers": (hostile("answers"), play_hostile),
    "answers and drafts": (hostile("answers", "drafts", "resets"), play_hostile),
    "crowd": (lambda seed: hostile_loads.load_of(seed, crowd=True), play_hostile),
}
"""What is played, by name: how a seed becomes a load, and how that is played."""


# Lines.


class Numbers:
    """Numbers of what is cached, in the order in which workers hear of them: how they are given is no behaviour."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._segments: set[int] = set()

    def of(self, number: int | None) -> int | None:
        """The same for the same."""
        return None if number is None else self._known.setdefault(number, len(self._known))

    def of_segment(self, number: int) -> int | None:
        """Likewise, of a segment."""
        self._segments.add(number)
        return self.of(number)

    def by_kind(self, numbers: Sequence[int]) -> list[list[int | None]]:
        """Those of compressed prefixes, and those of segments: each in its order, which is none between the two."""
        return [
            [self.of(number) for number in numbers if (number in self._segments) == is_segment]
            for is_segment in (False, True)
        ]


def line_of(simulation: Simulation, output: SchedulerOutput, numbers: Numbers, evicted: int) -> str:
    """A step as JSON: what the scheduler decided, what workers were told and did, what is held afterwards.

    Args:
        evicted: how many evictions there were before it.
    """
    message, workers, ledger = output.kv_connector_metadata, simulation.workers, simulation.ledger
    assert workers is not None
    step: dict[str, Any] = {
        "gone": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
        "drops": numbers.by_kind(message.drops),
        "cuts": {numbers.of(number): count for number, count in message.cuts.items()},
        "blocks": [message.new_blocks, message.lost_blocks],
        "answers": {name: _answer(answer) for name, answer in message.answers.items()},
        "admitted": [_admission(admission, numbers) for admission in message.admissions],
        "stores": {name: numbers.of(store.number) for name, store in message.stores.items()},
        "freezes": {
            name: [[numbers.of_segment(number), columns] for number, columns in segments]
            for name, segments in message.freezes.items()
        },
        "leaves": {name: [numbers.of(number), tokens] for name, (number, tokens) in message.leaves.items()},
        "scheduled": _scheduled(output, {name: resident.plan for name, resident in workers.live.items()}),
        "evicted": workers.evictions[evicted:],
        "most": message.most_pages,
        "held": [workers.held(rank) for rank in range(len(simulation.setup.shapes))],
        "ledger": [ledger.books.used, ledger.books.promised, ledger.books.held],
    }
    return json.dumps({name: value for name, value in step.items() if value})


def _answer(answer: ArbiterAnswer) -> str:
    """By the names that answers had when the record was written."""
    said = answer.said
    if isinstance(said, CutQuery):
        return f"CutQuestion(epoch={answer.epoch}, question={repr(said).replace('CutQuery', 'Question')})"
    if isinstance(said, int):
        return f"Cut(epoch={answer.epoch}, key={said})"
    return f"LayerBudgets(epoch={answer.epoch}, budgets={said!r})"


def _admission(admission: Admission, numbers: Numbers) -> list[Any]:
    plan = admission.plan
    segments = [[numbers.of(number), columns] for number, columns in admission.segments]
    last = admission.prefixes[-1] if admission.prefixes else None
    how = [admission.by_layer, admission.reserved_at, numbers.of(last), segments]
    end = plan.prompt and plan.prompt.end
    tail = [] if admission.tail is None else [numbers.of(admission.tail)]
    return [admission.request_id, admission.epoch, plan.config.policy, end, *how, admission.tokens, *tail]


def _scheduled(output: SchedulerOutput, plans: Mapping[str, Plan]) -> list[list[Any]]:
    """Requests and their tokens, in the order of the batch; those beside a prompt by the request they are of."""
    extra, beside = output.kv_connector_metadata.extra, {}
    if extra is not None:
        plan = plans[extra.request_id]
        chunk = ["repeat", extra.start, extra.stop, extra.stop == plan.prompt.end]
        repeats = schedule_of(plan.prompt).repeats_prompt
        beside[extra.name] = [extra.request_id, *(chunk if repeats else ["probe"])]
    drafts = output.scheduled_spec_decode_tokens
    return [
        [*beside.get(name, [name]), count, len(drafts.get(name, ()))]
        for name, count in output.num_scheduled_tokens.items()
    ]


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The steps of all simulations meanwhile, as they come."""
    lines: list[str] = []
    numbers, step = Numbers(), Simulation.step

    def recording(simulation: Simulation) -> SchedulerOutput:
        assert simulation.workers is not None
        evicted = len(simulation.workers.evictions)
        output = step(simulation)
        lines.append(line_of(simulation, output, numbers, evicted))
        return output

    with mock.patch.object(Simulation, "step", recording):
        yield lines


def run(mix: str, seed: int) -> list[str]:
    """The lines of a load."""
    make, play = MIXES[mix]
    with recorded() as lines:
        play(make(seed), seed)
    return lines


def everything(folder: Path, seeds: int = SEEDS) -> Record:
    """All mixes, so many seeds of each."""
    return {f"{mix} {seed}": run(mix, seed) for mix in MIXES for seed in range(seeds)}
