"""Compares what the scheduler and engines do with the record.

    python -m tests.record                      both parts
    python -m tests.record --part scheduler     seconds, on any machine
    python -m tests.record --lines FOLDER       every step as text: write them before and after, and compare

``--write`` makes a new record, for a change that is meant to change behaviour.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tests.conftest
import tests.engine.conftest  # noqa: F401  (both set what engines read from the environment)
from tests.record import engines, scheduler
from tests.record.lines import differences, digests
from vllm_kvevict import machine

PARTS = {"scheduler": scheduler.everything, "engines": engines.everything}
FOLDER = Path(__file__).parent


def recorded(part: str) -> dict[str, Any]:
    """The record of a part."""
    found: dict[str, Any] = json.loads((FOLDER / f"{part}.json").read_text())
    return found


def write(part: str, lines: dict[str, list[str]]) -> None:
    """Make lines the record of a part."""
    found = {"processor": machine.cpu_model(), "runs": digests(lines)}
    (FOLDER / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")


def write_lines(folder: Path, part: str, lines: dict[str, list[str]]) -> None:
    """Write the lines of each run to a file of its own."""
    for name, of_run in lines.items():
        path = folder / part / f"{name.replace(' ', '-')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(of_run) + "\n")


def check(part: str, lines: dict[str, list[str]]) -> list[str]:
    """What differs from the record of a part, a sentence for each run."""
    found = recorded(part)
    if part == "engines" and found["processor"] != machine.cpu_model():
        return [f"the record of engines is of {found['processor']}, and this is {machine.cpu_model()}"]
    return differences(found["runs"], digests(lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--write", action="store_true", help="make this the record")
    parser.add_argument("--lines", type=Path, metavar="FOLDER", help="write every step as text")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    found = []
    for part in [args.part] if args.part else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            lines = PARTS[part](Path(folder))
        if args.lines:
            write_lines(args.lines, part, lines)
        if args.write:
            write(part, lines)
        found += [f"{part}: {difference}" for difference in check(part, lines)]
        print(f"{part}: {len(lines)} runs, {sum(map(len, lines.values()))} lines")
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
