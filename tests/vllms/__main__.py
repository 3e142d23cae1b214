"""Runs vLLM's own tests of its scheduler with this package and without it: every test must end alike.

No test asks for eviction: what is compared is vLLM with the package installed and not used. Exit codes: 1 if tests
ended differently or too few ran, 3 if vLLM's tests cannot be had.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tests.vllms.outcomes import Run, read, report
from tests.vllms.sources import VERSION, SourceError, sources
from tests.vllms.stand_ins import make_stand_ins

PATHS = ("tests/v1/core",)
LEAST = 900
WITNESS = Path(__file__).parent / "witness"
NOWHERE = "http://127.0.0.1:9"
"""An address at which nobody answers."""
LEFT_OUT = ("VLLM_PLUGINS", "VLLM_KVEVICT_CHECK", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
"""What would change a run from outside."""


def environment(folder: Path, tests: Path, redirections: Path, package: bool) -> dict[str, str]:
    """Of a run, with the package or without; else the two are the same."""
    settings = {
        "PYTHONPATH": os.pathsep.join((str(tests / "needed"), str(WITNESS))),
        # Nothing is fetched, and nothing found that somebody fetched before: what runs is the same everywhere. (Told to
        # work offline, vLLM would look for a model before it asks which one stands in for it.)
        "HF_ENDPOINT": NOWHERE,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder / "huggingface"),
        "VLLM_MODEL_REDIRECT_PATH": str(redirections),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        **({} if package else {"VLLM_PLUGINS": ""}),
    }
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT} | settings


def run(folder: Path, tests: Path, paths: Sequence[str], redirections: Path, package: bool) -> Run:
    """Run the tests once.

    Args:
        folder: for what the run writes.
        tests: the folder of vLLM's sources.
        paths: below it; which tests.
        redirections: of the models that stand in for others.
        package: whether vLLM may load this package.
    """
    out = folder / f"{'with' if package else 'without'}.jsonl"
    settings = ["-c", "pyproject.toml", "-p", "kvevict_witness", "-p", "no:cacheprovider", "-W", "ignore"]
    shown = ["-q", "--no-header", "--tb=line"]
    words = [sys.executable, "-m", "pytest", *paths, *settings, *shown]
    env = environment(folder, tests, redirections, package) | {"KVEVICT_WITNESS": str(out)}
    subprocess.run(words, cwd=tests, env=env)
    return read(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "paths", nargs="*", default=PATHS, help=f"tests below vLLM's sources, else {PATHS[0]}"
    )
    parser.add_argument("--least", type=int, default=LEAST, help="as many must pass without the package")
    args = parser.parse_args(argv)
    if (found := metadata.version("vllm").partition("+")[0]) != VERSION:
        print(f"the tests are those of vLLM {VERSION}, and {found} is installed", file=sys.stderr)
        return 3
    try:
        tests = sources()
    except SourceError as error:
        print(error, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        redirections = make_stand_ins(folder)
        ours, stock = (run(folder, tests, args.paths, redirections, package) for package in (True, False))
    lines, alike = report(ours, stock, args.least)
    print(*lines, sep="\n")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
