"""What one side did with the requests of a round, and which of kvpress's two ways was the faster one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness.sides import Outcome, Workload
from benchmarks.kvpress.opponent import Opponent


@dataclass
class Run:
    """The requests of a round on one side.

    Attributes:
        wall, cpu: seconds; CPU seconds of all threads. Of the requests that were answered.
        prefill, decode: seconds of wall in which prompts were read, and of the rest.
        decode_steps: how many steps ``decode`` was.
        output_tokens: of all requests that were answered.
        answered: requests.
        errors: what the side said of each batch that it could not answer.
        stored_bytes: KV memory of all requests right after their prefill; None: not measured.
    """

    wall: float = 0.0
    cpu: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    decode_steps: int = 0
    output_tokens: int = 0
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    stored_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of the answered requests over their seconds; 0 without any."""
        return self.output_tokens / self.wall if self.wall else 0.0

    @property
    def step_ms(self) -> float:
        """Milliseconds of a decode step."""
        return 1e3 * self.decode / self.decode_steps if self.decode_steps else 0.0


Round = dict[str, Run]
"""One run of each side, by the side's name."""


def from_outcome(outcome: Outcome, work: Workload) -> Run:
    """The run of vLLM's engine. Steps that read prompts may decode other requests as well.

    Raises:
        RuntimeError: if prompt tokens came from a cache, which the other program does not have.
    """
    read = sum(prompt_tokens for _, prompt_tokens, _ in outcome.steps)
    if read < (wanted := work.requests * work.input_len):
        raise RuntimeError(
            f"the engine read {read} of {wanted} prompt tokens; the others were in its prefix cache"
        )
    return Run(
        wall=outcome.wall,
        cpu=outcome.cpu,
        prefill=outcome.prefill_seconds,
        decode=outcome.decode_seconds,
        decode_steps=sum(not prompt_tokens for _, prompt_tokens, _ in outcome.steps),
        output_tokens=outcome.output_tokens,
        answered=work.requests,
    )


def run_batches(
    opponent: Opponent, prompts: list[list[int]], size: int, output_len: int, press: str | None, budget: float
) -> Run:
    """Give the prompts to kvpress or transformers, so many at a time.

    A batch that fails adds its error and nothing else: its time does not count against the others.
    """
    run = Run(stored_bytes=0)
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        answer = opponent.generate(batch, output_len, press, budget)
        if "error" in answer:
            run.errors.append(answer["error"])
            continue
        run.wall += answer["wall"]
        run.cpu += answer["cpu"]
        run.prefill += answer["prefill"]
        run.decode += answer["decode"]
        run.decode_steps += output_len - 1
        run.output_tokens += sum(len(ids) for ids in answer["ids"])
        run.answered += len(batch)
        assert run.stored_bytes is not None
        run.stored_bytes += answer["stored_bytes"]
    return run


def faster(rounds: Sequence[Round], *sides: str) -> list[Run] | None:
    """The faster run of these sides in each round, of its requests that were answered.

    Returns:
        None if there is a round in which no side answered a request.
    """
    best = [max((one[side] for side in sides), key=lambda run: run.tokens_per_second) for one in rounds]
    return best if all(run.answered for run in best) else None
