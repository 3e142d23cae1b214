"""How long tests take, by their names in `tests/durations.json`: what is dear, and the order in which files run.

    python -m tests.durations               the dearest tests and files
    python -m tests.durations --read XML    take over what a run with `--junitxml=XML` measured (`make durations`)

A run starts with the files that take longest, so that two processes end together.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

PATH = Path(__file__).with_name("durations.json")
LEAST = 0.3
"""Seconds below which a test is not stored."""


def stored() -> dict[str, float]:
    """Seconds of each dear test by its name, such as ``tests/test_house.py::test_rules``."""
    found: dict[str, float] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return found


def by_file(tests: Mapping[str, float], names: Iterable[str]) -> Counter[str]:
    """Seconds of each file, of the tests of these names."""
    total: Counter[str] = Counter()
    for name in names:
        total[file_of(name)] += tests.get(name, 0)
    return total


def file_of(name: str) -> str:
    """The file of a test."""
    return name.partition("::")[0]


def longest_first(names: Sequence[str]) -> list[int]:
    """Places of tests in the order in which they run: by their files' seconds, each file's tests as they were."""
    files = by_file(stored(), names)
    return sorted(range(len(names)), key=lambda place: (-files[file_of(names[place])], file_of(names[place])))


def read(xml: Path) -> dict[str, float]:
    """Seconds of each test, with what it had to set up, as a run wrote them for pytest's ``--junitxml``."""
    found = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        module, name, seconds = case.get("classname", ""), case.get("name", ""), float(case.get("time", 0))
        if seconds >= LEAST:
            found[f"{module.replace('.', '/')}.py::{name}"] = round(seconds, 1)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--read", type=Path, metavar="XML", help="store what a run of all tests measured")
    parser.add_argument("--count", type=int, default=50, help="tests and files to show (50)")
    args = parser.parse_args(argv)
    if args.read:
        PATH.write_text(json.dumps(read(args.read), indent=0, sort_keys=True) + "\n")
    tests = Counter(stored())
    for what, seconds in (("tests", tests), ("files", by_file(tests, tests))):
        print(f"{len(seconds)} {what}, {seconds.total():.0f} s; the dearest:")
        for name, of_it in seconds.most_common(args.count):
            print(f"{of_it:8.1f}  {name}")


if __name__ == "__main__":
    main()
