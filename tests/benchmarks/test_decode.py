"""Steps of pure decode, their turns and targets, with engines that only count; no engine is started."""

import re
from types import SimpleNamespace

import pytest
from rich.progress import Progress

from benchmarks import decode
from benchmarks.decode import Cell, check_steps, parse_arguments
from benchmarks.harness.sides import Engine, Workload
from benchmarks.harness.steps import CHUNK, admit, output_len, prefill, requests


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
    arguments = parse_arguments(["--batch", "3", "--contexts", "3000", "--pairs", "3", "--steps", "2"])
    turns: list[str] = []
    sides = [FakeSide("stock", turns), FakeSide("ours", turns)]
    cell = decode.measure(arguments, 8, 3000, sides, Progress(disable=True))
    assert turns == ["stock", "ours", "stock", "ours", "ours", "stock", "stock", "ours"]
    assert len(cell.stock) == len(cell.ours) == 3
    assert not any(requests(side.engine) for side in sides)  # so that the next context starts afresh


@pytest.mark.parametrize(("batch", "context"), [(1, 100), (3, 3000), (16, 2048), (64, 700)])
def test_no_request_ends_before_the_last_block(batch, context):
    llm = FakeLLM()
    engine = Engine(llm, llm)
    steps = 20
    tokens = output_len(batch, context, steps)
    total = admit(engine, Workload(batch, context, tokens))
    assert prefill(engine, float("inf")) == total == batch * context
    decode.decode(engine, steps, batch)
    assert len(requests(engine)) == batch


def test_reading_prompts_stops_when_its_time_is_over():
    llm = FakeLLM()
    engine = Engine(llm, llm)
    admit(engine, Workload(4, 4096, 100))
    assert prefill(engine, 0.0) < 4 * 4096


def test_timed_steps_must_be_pure_decode():
    check_steps([(0.1, 0, 4)] * 3, steps=3, batch=4)
    for seen in ([(0.1, 7, 4)], [(0.1, 0, 3)]):
        with pytest.raises(RuntimeError, match="not pure decode"):
            check_steps(seen, steps=1, batch=4)
    with pytest.raises(RuntimeError, match="2 steps ran where 3"):
        check_steps([(0.1, 0, 4)] * 2, steps=3, batch=4)


def cell(layers: int, context: int, ratios=(4.0, 4.0, 4.0)) -> Cell:
    return Cell(layers, context, [(ratio, 2 * ratio) for ratio in ratios], [(1.0, 1.0)] * len(ratios))


def test_target_holds_for_the_default_sizes_and_the_low_end_of_the_interval(at_level):
    at_level("avx512")
    defaults = parse_arguments([])
    cells = [cell(8, 16384), cell(8, 4096), cell(4, 16384)]
    (target,) = decode.targets(defaults, cells)
    assert target.met
    (target,) = decode.targets(defaults, [cell(8, 16384, (4.0, 4.0, 3.0))])
    assert not target.met
    for changed in ("--budget 0.5", "--batch 8", "--policy snapkv", "--dtype float32"):
        assert decode.targets(parse_arguments(changed.split()), cells) == []
    at_level("avx2")
    assert decode.targets(parse_arguments([]), cells) == decode.targets(defaults, cells) == []


def test_ratios_are_stock_over_ours():
    summary = cell(8, 1024).summary()
    assert summary["wall_ratio"]["median"] == 4 and summary["cpu_ratio"]["median"] == 8
    assert summary["stock_ms"]["median"] == 4000 and summary["ours_ms"]["median"] == 1000


@pytest.mark.parametrize("level, name", [("avx512", "decode.png"), ("avx2", "decode-avx2-float32.png")])
def test_plot_draws_every_number_of_layers(tmp_path, monkeypatch, at_level, level, name):
    monkeypatch.setattr(decode, "RESULTS", tmp_path)
    at_level(level)
    path = decode.plot(parse_arguments([]), [cell(8, 4096), cell(8, 1024), cell(4, 1024)])
    assert path == str(tmp_path / name) and (tmp_path / name).exists()


@pytest.mark.parametrize(
    "arguments",
    ["--batch 0", "--batch 5000", "--contexts 512 0", "--pairs 0", "--model-layers 0", "--budget 1.5"],
)
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
