"""Formula, ratios, targets and options; no engine is started."""

import io

import pytest
from rich.console import Console

from benchmarks import prefill
from benchmarks.harness.scenarios import STOCK
from benchmarks.prefill import (
    ALL,
    IN_ONE_STEP,
    IN_STEPS,
    KEPT,
    ONLINE,
    OWN_CHUNK,
    Cell,
    Reading,
    make_sides,
    paper_share,
    parse_arguments,
    show,
    targets,
)


def cell(context: int, sides: dict[str, tuple[float, float, int]]) -> Cell:
    found = Cell(context)
    for side, (wall, attention, held) in sides.items():
        found.readings[side] = [Reading(wall, wall, attention, held)] * 3
    return found


def test_the_formula_of_the_paper():
    # (2 * 2048 + 512 + 2048) / (2 * 32768) - 2048 * 2560 / (2 * 32768^2)
    assert paper_share(32768) == pytest.approx(0.09912, abs=1e-5)
    assert paper_share(2048) == pytest.approx(1.0, abs=0.01)


def test_targets_are_those_of_the_longest_prompt(at_level):
    at_level("avx512")
    cells = [
        cell(8192, {STOCK: (1.0, 1.0, 100), "take": (1.0, 0.9, 40)}),
        cell(32768, {STOCK: (10.0, 8.0, 1000), "take": (5.0, 1.0, 130)}),
    ]
    held, attention = targets(parse_arguments([]), cells)
    assert held.value.median == 0.13 and not held.met
    assert attention.value.median == 0.125 and attention.met
    assert targets(parse_arguments(["--contexts", "8192"]), cells[:1]) == []
    assert targets(parse_arguments(["--dtype", "float32"]), cells) == [held]  # no time, but still the pages
    shown = io.StringIO()
    Console(file=shown, width=140).print(show(parse_arguments([]), cells))
    assert "0.099" in shown.getvalue() and "32768" in shown.getvalue()


def test_targets_of_recycling():
    cells = [cell(8192, {IN_STEPS: (1.0, 1.0, 100), IN_ONE_STEP: (1.0, 1.0, 16)})]
    (target,) = targets(parse_arguments(["recycle"]), cells)
    assert target.met and target.value.median == 0.16
    assert targets(parse_arguments(["recycle", "--budget", "0.5"]), cells) == []


def test_targets_of_repeating():
    sides = {KEPT: (1.0, 1.0, 100), ALL: (3.0, 1.0, 100), OWN_CHUNK: (1.7, 1.0, 100)}
    cells = [cell(2048, sides), cell(8192, sides)]
    all_of_it, own_chunk = targets(parse_arguments(["repeat"]), cells)
    assert all_of_it.met and all_of_it.value.median == 3.0
    assert not own_chunk.met and own_chunk.value.median == 1.7
    assert targets(parse_arguments(["repeat", "--contexts", "2048"]), cells[:1]) == []


def test_targets_of_scoring_online():
    sides = {KEPT: (1.0, 1.0, 100), "compactor": (1.02, 1.0, 100), "expected-attention": (1.04, 1.0, 100)}
    compactor, expected = targets(parse_arguments(["online"]), [cell(8192, sides)])
    assert compactor.met and not expected.met


@pytest.mark.parametrize("what", ["repeat", "online"])
def test_sides_with_a_question_differ_in_eviction_alone(what, monkeypatch):
    monkeypatch.setattr(prefill, "model", lambda max_len, layers: "m")
    monkeypatch.setattr(prefill, "Side", lambda name, model, threads, **settings: settings)
    settings = make_sides(parse_arguments([what]))
    policies = [one.pop("kv_eviction") for one in settings]
    assert policies == (["full", "kvzip", "kvzip"] if what == "repeat" else ["full", *ONLINE])
    settings[-1].pop("kv_eviction_config", None)
    assert settings[0] == settings[1] == settings[2]


def test_arguments():
    arguments = parse_arguments(["recycle"])
    assert (arguments.contexts, arguments.model_layers, arguments.threads) == ([2048, 8192], 16, 1)
    assert parse_arguments(["--contexts", "9000", "600"]).contexts == [600, 9000]
    with pytest.raises(SystemExit):
        parse_arguments(["--contexts", "100"])


def test_plot(tmp_path, monkeypatch, at_level):
    at_level("avx512")
    monkeypatch.setattr(prefill, "RESULTS", tmp_path)
    cells = [cell(8192, {STOCK: (1.0, 1.0, 100), "take": (1.0, 0.9, 40)})]
    assert prefill.plot(parse_arguments([]), cells) == str(tmp_path / "prefill-take.png")
