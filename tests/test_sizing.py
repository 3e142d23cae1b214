"""The sizing calculator against vLLM's scheduler with the real ledger, and its command line."""

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.engine.support.quick_starts import quick_starts
from tests.engine.support.servers import PAGE, Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict import sizing
from vllm_kvevict.engine.sizing import conversations, kept_queries, size
from vllm_kvevict.kernels.layout import INT8

LAYERS, HEADS, DIM = 4, 4, 32


def server(full: float, prompt: int, step: int, tensor: int = 1, stages: int = 1) -> sizing.Server:
    """Memory for ``full`` prompts on each rank."""
    rows = LAYERS * HEADS // (tensor * stages)
    return sizing.Server(
        layers=LAYERS,
        query_heads=2 * HEADS,
        kv_heads=HEADS,
        head_dim=DIM,
        max_len=1 << 15,
        dtype="bfloat16",
        memory=int(full * -(-prompt // PAGE)) * rows * PAGE * 4 * DIM,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        block_size=PAGE,
        max_num_batched_tokens=step,
    )


def test_entries_in_8_bits_have_less_memory():
    whole = server(4, 2048, 2048)
    quantised = dataclasses.replace(whole, kv_cache_dtype=INT8)
    assert (whole.layout.entry_bytes, quantised.layout.entry_bytes) == (4 * DIM, 2 * DIM + 8)
    settings = {"policy": "ada-snapkv", "budget": 0.2}
    fewer, more = (size(x, settings, 2048, 256)["at once"] for x in (whole, quantised))
    assert more / fewer == pytest.approx(4 * DIM / (2 * DIM + 8), rel=0.15)
    # Queries are kept as they are computed.
    (exact, _), (same, _) = (kept_queries(x, {**settings, "lookahead": 32}) for x in (whole, quantised))
    assert exact == same > 0


def simulate(
    server: sizing.Server,
    settings: dict[str, Any],
    prompt: int,
    output: int,
    count: int,
    prefix_caching: bool = False,
) -> Simulation:
    """Many requests arrive at once; real scheduler, real ledger, workers that keep lengths."""
    tensor, stages = server.tensor_parallel_size, server.pipeline_parallel_size
    shape = (LAYERS // stages, HEADS // tensor)
    pages = server.memory // (PAGE * 4 * DIM)
    setup = Setup(
        [shape] * (tensor * stages),
        [pages] * (tensor * stages),
        prompt + output,
        max_num_batched_tokens=server.max_num_batched_tokens,
        max_num_seqs=1000,
        depth=stages,
        pipeline=stages > 1,
        tensor=tensor,
        options=settings,
        prefix_caching=prefix_caching,
    )
    # The calculator takes competing rows to end anywhere in a page, as they do unless one of them takes all it can get.
    simulation = Simulation(setup, greeds=("random",))
    for index in range(count):
        simulation.add(make_request(f"r{index}", prompt, output))
    simulation.run(50_000)
    return simulation


ANSWERS = {"decode_budget": 160, "decode_interval": 64}
CASES = {
    "designed for": (4, 2048, 256, 2048, {"policy": "ada-snapkv", "budget": 0.2}),
    "even heads": (4, 2048, 256, 2048, {"policy": "snapkv", "budget": 0.2}),
    "tokens": (3, 3000, 300, 1024, {"policy": "snapkv", "budget": 256}),
    "large budget": (5, 1500, 200, 2048, {"policy": "snapkv", "budget": 0.7}),
    "one prompt": (1.3, 2048, 400, 512, {"policy": "streaming-llm", "budget": 0.1}),
    "layer by layer": (1.3, 1500, 400, 2048, {"policy": "snapkv", "budget": 0.1}),
    "layers differ": (4, 2048, 256, 1024, {"policy": "pyramidkv", "budget": 0.2}),
    "layers compete": (4, 2048, 256, 1024, {"policy": "lava", "budget": 0.2}),
    "chunks": (2, 2048, 256, 512, {"policy": "take", "budget": 200, "take_chunk": 512}),
    "no eviction": (6, 2048, 256, 512, {"policy": "full"}),
    "answers": (6, 512, 2048, 2048, {"policy": "full", **ANSWERS, "decode_policy": "snapkv"}),
    "answers of competing heads": (6, 512, 2048, 2048, {"policy": "full", **ANSWERS}),
    "a lookahead": (2.2, 2048, 256, 2048, {"policy": "snapkv", "budget": 0.2, "lookahead": 32}),
    "an answer within it": (4, 2048, 16, 2048, {"policy": "snapkv", "budget": 0.2, "lookahead": 32}),
    "prompts and answers": (2, 2048, 1024, 1024, {"policy": "snapkv", "budget": 0.2, **ANSWERS}),
}


RANKS = {"one rank": (1, 1), "tensor": (2, 1), "pipeline": (1, 2)}
RUNS = [(case, "one rank") for case in CASES]
RUNS += [(case, ranks) for case in ("layer by layer", "chunks") for ranks in ("tensor", "pipeline")]


@pytest.mark.parametrize(("case", "ranks"), RUNS)
def test_as_many_run_as_in_the_scheduler(case: str, ranks: str) -> None:
    full, prompt, output, step, settings = CASES[case]
    machine = server(full, prompt, step, *RANKS[ranks])
    row = size(machine, settings, prompt, output)
    simulation = simulate(machine, settings, prompt, output, count=row["at once"] + 4)
    assert row["at once"] == simulation.most_running
    recycles = prompt <= step and settings["policy"] != "full" and "lookahead" not in settings
    assert row["layered"] == ("yes" if recycles else "no")


def test_heads_that_compete_over_ranks_may_admit_fewer() -> None:
    """The calculator takes ranks to keep alike; the workers here let single ranks keep most."""
    full, prompt, output, step, settings = CASES["designed for"]
    machine = server(full, prompt, step, tensor=2)
    row = size(machine, settings, prompt, output)
    assert 0 <= row["at once"] - simulate(machine, settings, prompt, output, 16).most_running <= 2


def test_bytes_and_limits_of_even_heads() -> None:
    machine = server(4, 2048, 2048)
    row = size(machine, {"policy": "snapkv", "budget": 256}, 2048, 256)
    page, rows = PAGE * 4 * DIM, LAYERS * HEADS
    assert row["kept"] == 256
    assert row["evicted"] == rows * 8 * page and row["end"] == rows * 16 * page
    assert (
        row["reading"] == (HEADS * 64 + HEADS * 8 * (LAYERS - 1)) * page
    )  # one layer whole, the others evicted
    assert row["at end"] == 4 * 64 // 16
    assert row["limit"] == "answers"
    assert row["longest"] == 4 * 2048 - PAGE  # in blocks of a page, of which vLLM keeps one back
    assert row["cached"] == 4 * 64 // 8
    whole = size(machine, {"policy": "full"}, 2048, 256)
    assert whole["cached"] == 0
    assert (whole["kept"], whole["at once"], whole["at end"], whole["layered"]) == (2048, 3, 3, "no")
    assert whole["longest"] == 4 * 2048 - PAGE
    none = size(machine, {"policy": "full"}, 9000, 256)
    assert none["at once"] == none["at end"] == 0


@pytest.mark.parametrize(
    ("output", "ahead", "price"), [(256, 32, 1.38), (256, 16, 1.19), (768, 32, 1.09), (768, 16, 1.04)]
)
def test_what_a_lookahead_costs(output: int, ahead: int, price: float) -> None:
    machine, settings = server(4, 2048, 2048), {"policy": "snapkv", "budget": 0.2}
    page, rows = PAGE * 4 * DIM, LAYERS * HEADS
    without, row = (size(machine, settings | {"lookahead": n}, 2048, output) for n in (0, ahead))
    assert (without["price"], row["price"]) == ("1.00", f"{price:.2f}")
    assert (row["kept"], row["answer"], row["end"]) == (409, output - 1, without["end"])
    assert row["reading"] == rows * -(-(2048 + ahead) // PAGE) * page
    assert row["evicted"] == rows * -(-(409 + ahead) // PAGE) * page
    # One that ends within it holds all to its end.
    short = size(machine, settings | {"lookahead": ahead}, 2048, ahead + 1)
    assert short["end"] == row["reading"]
    for length, told in ((output, price), (ahead + 1, float(short["price"]))):
        held = [409 + token + (2048 - 409) * (token < ahead) for token in range(length)]
        assert sum(held) / sum(409 + token for token in range(length)) == pytest.approx(told, rel=5e-3)


def test_how_much_an_evicted_answer_takes() -> None:
    """Between two evictions it has 160 to 224 entries in each row, beside the 512 of the prompt."""
    machine, page = server(4, 512, 2048), PAGE * 4 * DIM
    settings = {"policy": "full", **ANSWERS, "decode_policy": "snapkv"}
    rows = LAYERS * HEADS
    for output in (300, 3000, 30_000):
        row = size(machine, settings, 512, output)
        assert (row["answer"], row["end"]) == (224, rows * 23 * page)
        assert row["at end"] == 4 * 16 // 23
    short = size(machine, settings, 512, 225)
    assert (short["answer"], short["end"]) == (224, rows * 23 * page)
    assert size(machine, settings, 512, 100)["answer"] == 99
    whole = size(machine, {"policy": "full"}, 512, 3000)
    assert (whole["answer"], whole["at end"]) == (2999, 0)
    competing = size(machine, {"policy": "full", **ANSWERS}, 512, 3000)
    assert row["end"] < competing["end"] <= row["end"] + rows * page


CHAT = {"policy": "snapkv", "budget": 0.25}
"""Of 2,048 tokens in turns of 300: five turns leave 75 in each row, and the last, of 548, leaves 137."""


def test_how_many_conversations_stay() -> None:
    """In each row 512 entries fill 16 pages, wherever turns end; a tail of 300 fills ten more."""
    machine = server(4, 2048, 2048)
    for turn in (300, 320):
        assert conversations(machine, CHAT, 2048, turn) == {"chats": 256 // 16, "with tail": 256 // 26}
    # Of 80 tokens each turn leaves 20, and of two in three ends within a page the next turn has a copy.
    assert conversations(machine, {**CHAT, "min_turn": 1}, 2048, 80)["chats"] == 256 // 25
    # One turn is one compressed prefix.
    assert conversations(machine, CHAT, 2048, 2048)["chats"] == size(machine, CHAT, 2048, 1)["cached"] == 16
    # Without eviction there are no turns.
    assert conversations(machine, {"policy": "full"}, 2048, 300) == {"chats": 4, "with tail": 3}
    # Short turns are evicted with the next one, the last time at 1,800: 450 entries in 15 pages, 398 tokens behind.
    short = {**CHAT, "min_turn": 300}
    assert conversations(machine, short, 2048, 150) == {"chats": 256 // 15, "with tail": 256 // 28}


def test_instructions_that_stay_whole() -> None:
    """The first of the five turns has 300 entries in each row instead of 75."""
    machine, settings = server(4, 2048, 2048), {**CHAT, "scope": "turns", "keep_first": True}
    assert conversations(machine, {**CHAT, "scope": "turns"}, 2048, 300)["chats"] == 256 // 16
    assert conversations(machine, settings, 2048, 300)["chats"] == 256 // -(-737 // PAGE)


def test_each_turn_is_one_of_the_prefixes_that_are_cached_at_most() -> None:
    machine = server(4096, 512, 512)
    settings = {**CHAT, "min_turn": 1}
    assert conversations(machine, settings, 512, 64) == {"chats": 4096 // 8, "with tail": 4096 // 8}
    assert conversations(machine, settings, 512, 128)["chats"] == 4096 // 4


TURNS = [*range(300, 1501, 300), 2048]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "ada-snapkv"])
def test_a_conversation_holds_what_its_prefixes_do_in_the_scheduler(policy: str, ranks: str) -> None:
    """Also in each stage, whose layers have budgets of their own; rows that compete end where they like."""
    machine, settings = server(4, 2048, 2048, *RANKS[ranks]), {**CHAT, "policy": policy}
    simulation = simulate(machine, settings, 0, 4096, count=0, prefix_caching=True)
    tokens = [index % 500 for index in range(2060)]
    simulation.add(make_request("chat", tokens, 1, {"kv_turns": TURNS}))
    simulation.run(1000)
    assert len(simulation.workers.cached) == len(TURNS)
    most = max(simulation.workers.cached_pages(rank) for rank in range(len(simulation.workers.ranks)))
    fit = machine.memory // (PAGE * 4 * DIM) // most
    assert abs(conversations(machine, settings, 2048, 300)["chats"] - fit) <= (policy == "ada-snapkv")
    # A control: short turns fill no pages, and what is before them is held twice.
    assert conversations(machine, {**settings, "min_turn": 1}, 2048, 64)["chats"] < fit


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The command lets vLLM say less in all of its process. Classes of models are looked at in this one."""
    with mock.patch.dict(os.environ), warnings.catch_warnings(), quick_starts():
        yield


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def write_model(folder: Path, **changes: Any) -> str:
    config = {
        **LLAMA,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": 2 * HEADS * DIM,
        "max_position_embeddings": 1 << 15,
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    sizing.main(["--model", model, "--memory", "64MiB", "--prompt", "2048", "--budget", "0.1", "256"])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "KV of one token: 2,048 bytes in all layers and heads; 32,640 tokens fit without eviction"
    )
    assert [line.split()[:2] for line in lines[2:5]] == [["full", "2048"], ["0.1", "204"], ["256", "256"]]
    sizing.main(["--model", str(tmp_path), "--memory", "64MiB", "--policy", "full", "--dtype", "float32"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("16,256 tokens fit without eviction") and not lines[3]


def test_the_model_is_as_vllm_serves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With scaled positions, in a file of any name, up to the length that is asked for."""
    scaled = {"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    named = Path(write_model(tmp_path, **scaled)).rename(tmp_path / "scaled.json")
    words = ["--model", str(named), "--memory", "64MiB", "--policy", "full"]
    sizing.main([*words, "--prompt", "15000"])
    assert capsys.readouterr().out.splitlines()[2].split()[8] == "16384"
    sizing.main([*words, "--prompt", "5000", "--max-model-len", "6000"])
    assert capsys.readouterr().out.splitlines()[2].split()[8] == "6000"
    with pytest.raises(SystemExit):
        sizing.main([*words, "--prompt", "16000"])
    assert "--prompt and --output exceed the 16384 tokens of the model: lower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "mib", "policies"),
    [
        ("--policy h2o", "4.0", "h2o"),
        ("--policy h2o --tensor-parallel-size 2 --max-model-len 16384", "1.0", "h2o"),
        ("--policy kvzip", "2.0", "kvzip"),
        ('--policy full --config {"policies":["h2o"]} --pipeline-parallel-size 3', "2.0", "h2o"),
        ("--policy snapkv", "", ""),
    ],
)
def test_what_is_set_aside_beside_the_kv_memory(
    words: str, mib: str, policies: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp32 sums of 32,768 tokens in 8 query heads of 4 layers: 4 MiB, in 4 KV heads 2.

    Of three stages one has two layers. And what compactor needs more: queries of 128 tokens of head size 32.
    """
    sizing.main(["--model", write_model(tmp_path), "--memory", "64MiB", *words.split()])
    said = f"Besides the KV memory each rank reserves {mib} MiB for requests with {policies}"
    assert (capsys.readouterr().out.splitlines()[1] == said) == bool(policies)


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        ({}, "--memory 20", "argument --memory: must be a size with its unit, such as 20GiB, got '20'"),
        ({}, "--budget 2.5", "--budget must be a ratio in (0, 1] or a whole number of tokens above 1"),
        (
            {},
            "--max-model-len 8192",
            "--prompt and --output exceed the 8192 tokens of --max-model-len: lower",
        ),
        ({}, "--turn 9000", "--turn must be from 1 to the 8192 tokens of --prompt, got 9000"),
        ({}, "--turn 512 --policy take", "--turn cannot be used with policy take (choose from "),
        ({}, "--page-size 96", "--page-size 96 must divide --block-size 128"),
        ({}, '--config {"windows":3}', "--config.windows does not apply to policy ada-snapkv"),
        (
            {},
            '--policy take --config {"take_warmup_layers":3} --pipeline-parallel-size 2',
            "--policy take cannot be combined with --pipeline-parallel-size",
        ),
        (GEMMA, "", "or with MLA, are not supported"),
    ],
)
def test_errors_name_the_flag(
    changes: dict[str, Any], words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        sizing.main(["--model", write_model(tmp_path, **changes), "--memory", "1GiB", *words.split()])
    assert error.value.code == 2
    assert says in capsys.readouterr().err
