"""One page of everything that was measured: ``python -m benchmarks.report``.

Reads the JSON files of a folder and writes README.md and plots of sweeps there. Every figure comes from the files;
missed targets, and loads on which eviction does not pay, are marked as such.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.measure import RESULTS, Estimate
from benchmarks.harness.plots import Panel, plot
from benchmarks.harness.scenarios import OVER_BASELINE, SPEED, STOCK
from vllm_kvevict.quality.tables import picture, table

THROUGHPUT, SWEEP, LATENCY, KVPRESS = "throughput-", "throughput-sweep-", "latency", "kvpress"
"""How the names of these records begin."""
ABOUT = (
    "Ratios are medians with a 95 % bootstrap interval in brackets: of three rounds their least and "
    "most, of one round nothing. A target is met if the whole interval meets it."
)
Records = dict[str, dict[str, Any]]


def comparisons(name: str, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of a record of ``throughput``: of its scenario, or of the values of its sweep."""
    own = name.removeprefix(THROUGHPUT)
    return {f"{own}, {one['value']}": one for one in results.get("values", ())} or {own: results}


def speed(comparison: dict[str, Any], turn: str) -> float:
    """Output tokens/s of a turn, the median of the rounds."""
    return median(one[turn]["tokens_per_second"] for one in comparison["rounds"])


def reference(comparison: dict[str, Any]) -> str:
    """The turn of stock vLLM, which is the first."""
    return next(iter(comparison["rounds"][0]))


def load_rows(name: str, comparison: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of the table of loads, one for each side with eviction."""
    of = comparison["scenario"]
    ranks = f", TP {of['tensor']} x PP {of['pipeline']}" if of["tensor"] * of["pipeline"] > 1 else ""
    load = (
        f"{of['requests']} x ({of['input_len']} in, {of['output_len']} out), memory for {of['pool']}{ranks}"
    )
    stock = f"{speed(comparison, reference(comparison)):.1f}"
    for side, ratios in comparison["ratios"].items():
        over_stock = Estimate(**ratios[SPEED])
        pays = over_stock.low > 1 or len(comparison["rounds"]) == 1
        baseline = ratios.get(OVER_BASELINE)
        shown = f"{side} ({Estimate(**baseline)} the baseline's)" if baseline else side
        ratio = str(over_stock) if pays else f"**{over_stock}**"
        yield name, load, shown, f"{speed(comparison, side):.1f}", stock, ratio


def read(folder: Path) -> Records:
    """The records of a folder by the names of their files; those of GPUs are in a folder inside.

    Raises:
        ValueError: if it has none, or a file is not a record.
    """
    records = {}
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("gpu/*.json"))]:
        try:
            content = json.loads(path.read_text())
            content["results"], content["command"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a benchmark's record: {error!r}") from error
        records[str(path.relative_to(folder).with_suffix(""))] = content
    if not records:
        raise ValueError(f"{folder} holds no results: run a benchmark first")
    return records


def targets(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record's targets, and those of the scenarios in it."""
    yield from results.get("targets", [])
    for scenario in results.get("scenarios", {}).values():
        yield from scenario.get("targets", [])


def missed_section(records: Records) -> list[str]:
    """Every target that was missed."""
    rows = []
    for name, content in records.items():
        for target in targets(content["results"]):
            if not target["met"]:
                value, sign = target["value"], "at most" if target["at_most"] else "at least"
                shown = str(Estimate(**value)) if isinstance(value, dict) else f"{value:.3g}"
                rows.append((_link(name), target["name"], shown, f"{sign} {target['bound']:g}"))
    return (
        ["## Missed targets", "", *table(("file", "measured", "result", "target"), rows, 2)] if rows else []
    )


def loads_section(found: dict[str, dict[str, Any]]) -> list[str]:
    """The speed of every load beside stock vLLM; where it is not above stock's beyond doubt, it is bold."""
    rows = [row for name, comparison in found.items() for row in load_rows(name, comparison)]
    header = ("measured", "load", "side", "tokens/s", "stock's", SPEED)
    about = "Bold: eviction does not clearly pay."
    return ["## Loads", "", about, "", *table(header, rows, 3)] if rows else []


def latency_section(records: Records) -> list[str]:
    """Latencies over stock's, by arrival rate."""
    rows = []
    for name in (name for name in records if name.startswith(LATENCY)):
        for at in records[name]["results"]["rates"]:
            for side, latencies in at["latency_ratios"].items():
                for latency, of in latencies.items():
                    ratios = (str(Estimate(**of[statistic])) for statistic in ("p50", "p90", "p99"))
                    rows.append((_link(name), f"{at['multiple']:g}x, {side}", latency, *ratios))
    header = ("file", "arrivals over what stock completes, side", "latency", "p50", "p90", "p99")
    return ["## Latencies over stock's", "", *table(header, rows, 3)] if rows else []


def kvpress_section(records: Records) -> list[str]:
    """Ours over kvpress on transformers."""
    measures = ("output tokens/s", "milliseconds per decode step")
    rows = [
        (_link(name), pair, *("failed" if of[m] is None else str(Estimate(**of[m])) for m in measures))
        for name, content in records.items()
        if name.startswith(KVPRESS)
        for pair, of in content["results"]["ratios"].items()
    ]
    return ["## Compared with kvpress", "", *table(("file", "sides", *measures), rows, 2)] if rows else []


def sources(records: Records) -> list[str]:
    """Where each file comes from."""
    about = "Commands follow `python -m`."
    lines = ["## Where the figures come from", "", about, ""]
    for name, content in records.items():
        judged = [target["met"] for target in targets(content["results"])]
        met = f"; {sum(judged)} of {len(judged)} met" if judged else ""
        machine = content["card"]["name"] if "card" in content else content["cpu"]
        level = f", {content['level']}" if "level" in content else ""
        about = f"{content['date'][:10]}, {machine}{level}{_threads(content['results'])}{met}"
        lines.append(f"- {_link(name)}: `{content['command'].removeprefix('python -m ')}`; {about}")
    return lines


def _link(name: str) -> str:
    return f"[{name}]({name}.json)"


def _threads(results: dict[str, Any]) -> str:
    settings = results.get("settings", results)
    return f", threads: {settings['threads'] or 'as vLLM places them'}" if "threads" in settings else ""


def plot_sweep(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Tokens per second of both sides, and their ratio, over what was varied."""
    over = path.stem.removeprefix(SWEEP)
    speeds: dict[str, list[tuple[str, float]]] = {STOCK: [], "with eviction": []}
    ratios: list[tuple[str, Estimate]] = []
    for name, comparison in found.items():
        place = name.rpartition(", ")[2]
        side, reached = next(iter(comparison["ratios"].items()))
        speeds[STOCK].append((place, speed(comparison, reference(comparison))))
        speeds["with eviction"].append((place, speed(comparison, side)))
        ratios.append((place, Estimate(**reached[SPEED])))
    panels = Panel(over, "output tokens/s", speeds), Panel(over, SPEED, {"with eviction": ratios}, 1)
    plot(path, panels)


def write(folder: Path) -> Path:
    """Write README.md and the sweeps' plots into the folder; returns the text's path.

    Raises:
        ValueError: see read.
    """
    records = read(folder)
    loads = {
        name: comparisons(name, content["results"])
        for name, content in records.items()
        if name.startswith(THROUGHPUT)
    }
    for name, found in loads.items():
        if name.startswith(SWEEP) and len(found) > 1:
            plot_sweep(found, folder / f"{name}.png")
    drawn = [picture(path.stem, path.name) for path in sorted(folder.glob("*.png"))]
    parts = [
        ["# Benchmark results", "", "Written by `python -m benchmarks.report`. " + ABOUT],
        missed_section(records),
        loads_section({name: one for found in loads.values() for name, one in found.items()}),
        latency_section(records),
        kvpress_section(records),
        ["## Plots", *(line for lines in drawn for line in ("", *lines))] if drawn else [],
        sources(records),
    ]
    output = folder / "README.md"
    output.write_text("\n\n".join("\n".join(part) for part in parts if part) + "\n")
    return output


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    about = "folder of the JSON files (default: the project's)"
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help=about)
    arguments = parser.parse_args(argv)
    try:
        print(f"written to {write(arguments.folder)}")
    except ValueError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
