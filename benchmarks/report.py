"""One page of everything that was measured: ``python -m benchmarks.report``.

Reads the JSON files of a folder and writes README.md and plots there, and WHEN-IT-PAYS.md where loads were swept. Every
figure comes from the files; missed targets and loads on which eviction does not pay are listed as such.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import payoff
from benchmarks.harness.baseline_section import baseline_section
from benchmarks.harness.cells import SWEEP, Cell, cells, dtype, scenarios, sweeps
from benchmarks.harness.measure import RESULTS, Estimate
from benchmarks.harness.scenarios import PER_CPU, SPEED, STOCK
from vllm_kvevict.quality.tables import picture, table

LATENCY, KVPRESS = "latency", "kvpress"
AXES = {
    "pool": "full requests that the KV memory holds",
    "budget": "budget",
    "context": "tokens of each prompt",
    "parallel": "TP x PP",
    "load": "tokens of prompt x answer @ full requests that the KV memory holds",
}
"""What a sweep varies."""
PICTURES = {
    "breakdown": "where an engine step goes",
    "attention": "decode attention over a share of the KV, speed-up over all KV with vLLM's op",
    "decode": "a step of pure decode",
    "prefill-take": "long prompts read by stock vLLM and by take",
    "prefill-repeat": "a document read without eviction, and repeated by kvzip before it is evicted",
    "prefill-online": "a document read without eviction, and with policies that score it while it is read",
    "prefill-recycle": "a prompt read in several steps and in one, evicted at its end",
    "micro": "operations over what the machine allows",
}
"""Plots that a benchmark draws itself; names may go on with a level and a dtype."""
ABOUT = (
    "Ratios are medians of runs in turns, with a 95 % bootstrap interval in brackets: of three rounds that is the "
    "least and the most of them, of one round nothing. A target is met if the whole interval meets it. Threads "
    "that are vLLM's own are as many on both sides."
)
BURSTS = "A busy server hands several tokens over at a time, so half of the times between tokens (itl) can be zero."


def is_of(name: str, base: str) -> bool:
    """Whether a file's name is this one, with or without level and dtype behind it."""
    return name == base or name.startswith(f"{base}-")


def heading(text: str, name: str, base: str) -> str:
    """A section's heading, with what the file's name has on top of the plain one."""
    rest = name.removeprefix(base).removeprefix("-")
    return f"## {text} ({rest})" if rest else f"## {text}"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder by the names of their files.

    Raises:
        ValueError: if it has none, or a file is not a record.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
            content["results"], content["command"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a benchmark's record: {error!r}") from error
        records[path.stem] = content
    if not records:
        raise ValueError(f"{folder} holds no results: run a benchmark first")
    return records


def sources(records: dict[str, dict[str, Any]]) -> list[str]:
    """Where each file comes from."""
    rows = []
    for name, content in records.items():
        versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
        threads = _threads(content["results"])
        command, date = f"`{content['command']}`", content["date"][:10]
        level = content.get("level", "not recorded")
        load = content["results"].get("load_average_at_start")
        busy = "-" if load is None else f"{load:.1f}"
        machine = content.get("card", content["cpu"])
        rows.append((_link(name), command, date, machine, level, versions, threads, busy))
    header = ("file", "command", "date", "processor", "level", "versions", "threads", "load at start")
    about = "Load at start: the load average then. Above half the cores others worked there, or a run had just ended."
    return ["## Where the figures come from", "", about, "", *table(header, rows, left=7)]


def _link(name: str) -> str:
    return f"[{name}]({name}.json)"


def _threads(results: dict[str, Any]) -> str:
    settings = results if "threads" in results else results.get("settings", {})
    if "threads" not in settings:
        return "-"
    return "vLLM's own" if settings["threads"] is None else str(settings["threads"])


def _targets(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record's targets, and those of the scenarios in it, which then name them."""
    yield from results.get("targets", [])
    for name, scenario in results.get("scenarios", {}).items():
        for target in scenario.get("targets", []):
            yield {**target, "name": f"{name}: {target['name']}"}


def target_section(records: dict[str, dict[str, Any]]) -> list[str]:
    """Every target and whether it was met."""
    rows = []
    for name, content in records.items():
        for target in _targets(content["results"]):
            value = target["value"]
            shown = str(Estimate(**value)) if isinstance(value, dict) else f"{value:.3g}"
            sign = "at most" if target["at_most"] else "at least"
            verdict = "met" if target["met"] else "**missed**"
            rows.append((_link(name), target["name"], shown, f"{sign} {target['bound']:g}", verdict))
    return ["## Targets", "", *table(("file", "measured", "result", "target", ""), rows, 2)] if rows else []


def throughput_section(found: Sequence[Cell]) -> list[str]:
    """Every scenario's loads, speeds and memory."""
    if not found:
        return []
    rows = [(cell.name, cell.load, *_figures(cell)) for cell in found]
    return ["## Scenarios", "", *table(("scenario", "load", *FIGURES), rows, left=3)]


FIGURES = (
    *("side", "tokens/s", "stock's", SPEED, PER_CPU),
    *("at once", "stock's", "KV MiB", "stock's"),
)


def _figures(cell: Cell) -> tuple[str, ...]:
    """Side, speeds, requests at once and KV held."""
    shown = [cell.side]
    shown += [f"{cell.typical(turn, 'tokens_per_second'):.1f}" for turn in (cell.side, STOCK)]
    shown += [str(cell.ratios[measure]) for measure in (SPEED, PER_CPU)]
    shown += [f"{cell.typical(turn, 'peak_running'):g}" for turn in (cell.side, STOCK)]
    shown += [f"{cell.typical(turn, 'physical_bytes') / 2**20:.1f}" for turn in (cell.side, STOCK)]
    return tuple(shown)


def sweep_section(what: str, found: Sequence[Cell], name: str) -> list[str]:
    """One sweep and the plot beside its file: plot and table."""
    rows = [(cell.name.removeprefix(f"{what} "), *_figures(cell)) for cell in found]
    return [
        heading(f"Throughput over the {AXES[what]}", name, f"{SWEEP}{what}"),
        "",
        f"First row: {found[0].load}.",
        "",
        *picture(f"throughput over the {AXES[what]}", f"{name}.png"),
        "",
        *table((what, *FIGURES), rows, left=2),
    ]


def latency_section(records: dict[str, dict[str, Any]]) -> list[str]:
    """Latencies over arrival rates."""
    lines = []
    for name in (name for name in records if name.startswith(LATENCY)):
        results = records[name]["results"]
        rows = [
            (
                f"{at['scenario']['rate']:.2f} ({at['multiple']:g}x)",
                side,
                latency,
                *_latencies(at, side, latency),
            )
            for at in results["rates"]
            for side, latencies in at["latency_ratios"].items()
            for latency in latencies
        ]
        header = (
            "requests/s",
            "side",
            "latency",
            *(f"{p} ms, stock's / ours / ratio" for p in ("p50", "p90", "p99")),
        )
        (first, *_) = cells(name, results["rates"][0], records[name].get("level"))
        lines += [f"## Latency ({name})", "", f"{first.load}; Poisson arrivals. {BURSTS}", ""]
        lines += [*picture("latency over the arrival rate", f"{name}.png"), "", *table(header, rows, 3), ""]
    return lines[:-1]


def _latencies(at: dict[str, Any], side: str, latency: str) -> list[str]:
    shown = []
    for statistic in ("p50", "p90", "p99"):
        times = [
            median(one[of]["latency"][latency][statistic] for one in at["rounds"]) * 1e3
            for of in (STOCK, side)
        ]
        ratio = Estimate(**at["latency_ratios"][side][latency][statistic])
        shown.append(f"{times[0]:.1f} / {times[1]:.1f} / {ratio}")
    return shown


def kvpress_section(records: dict[str, dict[str, Any]]) -> list[str]:
    """Ours beside kvpress on transformers: speeds of every side, and ratios."""
    lines = []
    for name in (name for name in records if is_of(name, KVPRESS)):
        lines += [*kvpress_part(name, records[name]["results"]), ""]
    return lines[:-1]


def kvpress_part(name: str, results: dict[str, Any]) -> list[str]:
    """One comparison with kvpress."""
    settings, rounds = results["settings"], results["rounds"]
    speeds = []
    for side in rounds[0]:
        runs = [one[side] for one in rounds if one[side]["answered"]]
        failed = sum(len(one[side]["errors"]) for one in rounds)
        speed = f"{median(run['output_tokens'] / run['wall'] for run in runs):.1f}" if runs else "-"
        speeds.append((side, speed, failed))
    measures = list(next(iter(results["ratios"].values())))
    ratios = [
        (pair, *("failed" if found[m] is None else str(Estimate(**found[m])) for m in measures))
        for pair, found in results["ratios"].items()
    ]
    return [
        heading("Compared with kvpress on transformers", name, KVPRESS),
        "",
        f"{settings['requests']} x ({settings['input_len']} in, {settings['output_len']} out), "
        f"budget {settings['budget']:g}, {dtype(settings)}.",
        "",
        *table(("side", "output tokens/s", "batches that failed"), speeds),
        "",
        *table(("sides", *measures), ratios),
    ]


def no_gain(found: Sequence[Cell]) -> list[str]:
    """The loads on which a side with eviction is not faster than stock vLLM, slowest first.

    One round says nothing about how sure it is, so it is no comparison.
    """
    found = [cell for cell in found if len(cell.rounds) > 1]
    losing = sorted(
        (cell for cell in found if cell.ratios[SPEED].low <= 1), key=lambda cell: cell.ratios[SPEED].median
    )
    if not losing:
        return []
    rows = [
        (
            cell.name,
            cell.load,
            cell.side,
            cell.ratios[SPEED],
            cell.ratios[PER_CPU],
            "slower" if cell.ratios[SPEED].high < 1 else "no clear difference",
        )
        for cell in losing
    ]
    return [
        "## Where eviction does not pay",
        "",
        f"{len(losing)} of {len(found)} comparisons of several rounds, slowest first; memory may be saved "
        "nevertheless.",
        "",
        *table(("measured", "load", "side", SPEED, PER_CPU, ""), rows, 3),
    ]


def longer(records: dict[str, dict[str, Any]]) -> list[str]:
    """The latencies that eviction clearly makes longer."""
    rows = [
        (_link(name), f"{at['multiple']:g}x", side, f"{latency}, {statistic}", ratio)
        for name in records
        if name.startswith(LATENCY)
        for at in records[name]["results"]["rates"]
        for side, latencies in at["latency_ratios"].items()
        for latency, statistics in latencies.items()
        for statistic, value in statistics.items()
        if (ratio := Estimate(**value)).low > 1
    ]
    if not rows:
        return []
    header = ("file", "arrivals over what stock completes", "side", "latency", "over stock's")
    return ["Latencies that get longer:", "", *table(header, rows, 4)]


def pictures(records: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """Plots that were drawn with their results."""
    lines = []
    for base, about in PICTURES.items():
        for name in (name for name in records if is_of(name, base) and (folder / f"{name}.png").exists()):
            lines += [f"## {name}", "", f"{about[0].upper()}{about[1:]}.", ""]
            lines += [*picture(about, f"{name}.png"), ""]
    return lines[:-1]


def plot_sweep(what: str, found: Sequence[Cell], path: Path) -> Path:
    """Tokens per second of all sides, and the sides' ratios with their intervals; returns the path."""
    from matplotlib import pyplot

    values = list(dict.fromkeys(cell.name.removeprefix(f"{what} ") for cell in found))
    sides = list(dict.fromkeys(cell.side if what != "budget" else "with eviction" for cell in found))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    places = range(len(values))
    for number, side in enumerate(sides):
        line = [cell for cell in found if what == "budget" or cell.side == side]
        if number == 0:
            stock = [cell.typical(STOCK, "tokens_per_second") for cell in line]
            left.plot(places, stock, "o-", color="grey", label="stock vLLM")
        left.plot(places, [cell.typical(cell.side, "tokens_per_second") for cell in line], "o-", label=side)
        speeds = [cell.ratios[SPEED] for cell in line]
        spans = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
        right.errorbar(places, [s.median for s in speeds], spans, marker="o", capsize=3, label=side)
    right.axhline(1, color="grey", linewidth=0.8)
    for panel, label in ((left, "output tokens/s"), (right, SPEED)):
        panel.set(xlabel=AXES[what], ylabel=label, ylim=(0, None))
        panel.set_xticks(list(places), values)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path


def on_gpus(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of GPUs, in a folder of their own; their names say so."""
    inside = folder / "gpu"
    return {f"gpu/{name}": content for name, content in read(inside).items()} if inside.is_dir() else {}


def write(folder: Path) -> Path:
    """Write README.md and the sweeps' plots into the folder; returns the text's path.

    Raises:
        ValueError: see read.
    """
    records, gpus = read(folder), on_gpus(folder)
    swept = sweeps(records)
    loads = scenarios(records)
    parts = [
        ["# Benchmark results", "", "Written by `python -m benchmarks.report`. " + ABOUT],
        target_section(records | gpus),
    ]
    parts += [throughput_section(loads), baseline_section(loads)]
    for name, found in swept.items():
        what = records[name]["results"]["sweep"]
        if what == "load":
            payoff.plot(found, folder / f"{name}.png")
        else:
            plot_sweep(what, found, folder / f"{name}.png")
        parts.append(sweep_section(what, found, name))
    parts.append(no_gain([*loads, *(cell for found in swept.values() for cell in found)]))
    parts += [
        longer(records),
        latency_section(records),
        kvpress_section(records),
        pictures(records, folder),
        sources(records | gpus),
    ]
    of_loads = {name: found for name, found in swept.items() if records[name]["results"]["sweep"] == "load"}
    if of_loads:
        (folder / payoff.PAGE).write_text(payoff.page(records, of_loads))
    output = folder / "README.md"
    output.write_text("\n\n".join("\n".join(part) for part in parts if part) + "\n")
    return output


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
