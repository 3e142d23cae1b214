"""Steps of pure decode and their turns, with engines that only count; no engine is started."""

from types import SimpleNamespace

import pytest

from benchmarks.harness.sides import Engine, Workload
from benchmarks.micro import decode
from benchmarks.micro.decode import check_steps
from benchmarks.micro.engines import CHUNK, admit, output_len, prefill, requests
from benchmarks.micro.loop import parse


class FakeRequest:
    """A request of ``prompt`` tokens."""

    def __init__(self, name: str, prompt: int, max_tokens: int):
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, prompt, max_tokens
        self.num_computed_tokens = 0


class FakeLLM:
    """Schedules as vLLM does: decoding requests first, the rest of the chunk for prompts, in order."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.requests: dict[str, FakeRequest] = {}
        self.steps: list[tuple[float, int, int]] = []
        self.scheduler = SimpleNamespace(requests=self.requests)

    def reset(self) -> None:
        self.steps.clear()

    def add_request(self, name: str, prompt: dict, params) -> None:
        self.requests[name] = FakeRequest(name, len(prompt["prompt_token_ids"]), params.max_tokens)

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert internal
        for name in names:
            del self.requests[name]

    def step(self) -> None:
        room, scheduled, prompt = CHUNK, 0, 0
        for request in list(self.requests.values()):
            left = request.num_prompt_tokens - request.num_computed_tokens
            tokens = min(room, max(left, 1))
            if not tokens:
                continue
            room, scheduled = room - tokens, scheduled + 1
            prompt += tokens if left > 0 else 0
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_prompt_tokens + request.max_tokens - 1:
                del self.requests[request.request_id]
        self.steps.append((0.0, prompt, scheduled))


class FakeSide:
    """A side whose engine lives here; notes who decodes."""

    def __init__(self, name: str, turns: list[str]):
        self.name, self.turns, self.answers = name, turns, []
        llm = FakeLLM()
        self.engine = Engine(llm, llm)

    def call(self, work, *arguments):
        if work is decode.decode:
            self.turns.append(self.name)
        return work(self.engine, *arguments)

    def send(self, work, *arguments) -> None:
        self.answers.append(self.call(work, *arguments))

    def receive(self):
        return self.answers.pop()


def test_sides_take_turns_once_all_prompts_are_read():
    words = ["--batch", "3", "--contexts", "3000", "--pairs", "3", "--steps", "2"]
    arguments = parse("decode", decode, words)
    turns: list[str] = []
    sides = [FakeSide("stock", turns), FakeSide("ours", turns)]
    cell = decode.measure_at(arguments, 3000, sides)
    assert turns == ["ours", "stock", "stock", "ours", "ours", "stock", "stock", "ours"]
    assert len(cell.pairs) == 3 and cell.of == {"context": 3000}
    assert not any(requests(side.engine) for side in sides)  # so that the next context starts afresh


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (3, 3000), (16, 2048), (64, 700)])
def test_no_request_ends_before_the_last_block(batch, context):
    llm = FakeLLM()
    engine = Engine(llm, llm)
    steps = 20
    tokens = output_len(batch, context, steps)
    total = admit(engine, Workload(batch, context, tokens))
    assert prefill(engine) == total == batch * context
    decode.decode(engine, steps, batch)
    assert len(requests(engine)) == batch


def test_timed_steps_must_be_pure_decode():
    check_steps([(0.1, 0, 4)] * 3, steps=3, batch=4)
    for seen in ([(0.1, 7, 4)], [(0.1, 0, 3)]):
        with pytest.raises(RuntimeError, match="not pure decode"):
            check_steps(seen, steps=1, batch=4)
    with pytest.raises(RuntimeError, match="2 steps ran where 3"):
        check_steps([(0.1, 0, 4)] * 2, steps=3, batch=4)
