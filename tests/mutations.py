"""Shows that the tests still notice small faults: each of `mutations.toml` must fail the one test file that it names.

    python -m tests.mutations             all, two at a time: a quarter of an hour on two cores
    python -m tests.mutations 3 17        the third and the seventeenth
    python -m tests.mutations --clean     without faults: then all named files must pass, since else they prove nothing

Run it after tests were removed or merged, and see whether the failure that it prints has to do with the fault. Each is
tried in a copy of the tree, which itself stays as it is.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 900  # that a test file may take


@dataclass(frozen=True)
class Mutation:
    """A fault: `old`, which is once in `file`, becomes `new`. Of the file `test` only what `k` chooses is run."""

    file: str
    old: str
    new: str
    test: str
    wrong: str
    k: str = ""


def mutations() -> list[Mutation]:
    """All of the list, in its order; people count from 1."""
    text = Path(__file__).with_suffix(".toml").read_text()
    return [Mutation(**entry) for entry in tomllib.loads(text)["mutation"]]


def copy_tree(to: Path) -> None:
    """Copy what git tracks, and link what an installed tree has besides."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0")[:-1]:
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    (to / "vllm_kvevict" / "kernels").symlink_to("../kernels")
    (to / ".venv").symlink_to(sys.prefix)


def run(mutation: Mutation, is_clean: bool) -> tuple[str, float, str]:
    """Run the test file in a copy of the tree, with the fault or without: verdict, seconds, and what pytest says."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_tree(Path(folder))
        file = Path(folder, mutation.file)
        text = file.read_text()
        if not is_clean and text.count(mutation.old) != 1:
            return "BROKEN", 0.0, f"{mutation.file} does not have the text once"
        file.write_text(text if is_clean else text.replace(mutation.old, mutation.new))
        # A line of pytest's summary is as long as the terminal. In an empty cache no compiled kernel hides the change.
        environment = {**os.environ, "PYTHONPATH": folder, "COLUMNS": "250"}
        if file.suffix in (".cpp", ".h"):
            environment["XDG_CACHE_HOME"] = f"{folder}/.cache"
        started = time.monotonic()
        code, output = _pytest(mutation, folder, environment)
    # Any other code: pytest could not collect the file, found no test, was ended, or took too long.
    verdicts = {0: "passes", 1: "FAILS"} if is_clean else {0: "NOT CAUGHT", 1: "caught"}
    return verdicts.get(code, "BROKEN"), time.monotonic() - started, output


def _pytest(mutation: Mutation, folder: str, environment: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation.test]
    command += ["-k", mutation.k] if mutation.k else []
    with tempfile.TemporaryFile("w+") as output:
        to_file = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, cwd=folder, env=environment, **to_file)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # engines have processes of their own
        code = process.wait()
        output.seek(0)
        return code, output.read()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="only these, from 1 on")
    parser.add_argument("--clean", action="store_true", help="run the named files without faults")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at once (default: %(default)s)")
    args = parser.parse_args(argv)
    chosen = {n: x for n, x in enumerate(mutations(), 1) if not args.numbers or n in args.numbers}
    if args.clean:  # each file once
        chosen = {n: chosen[n] for n in {(x.test, x.k): n for n, x in chosen.items()}.values()}
    good, bad = "passes" if args.clean else "caught", 0
    pool = ThreadPoolExecutor(args.jobs)
    running = {pool.submit(run, mutation, args.clean): number for number, mutation in chosen.items()}
    for done in as_completed(running):
        number, (verdict, seconds, output) = running[done], done.result()
        lines, mutation = output.splitlines(), chosen[number]
        failed = next((line[:200] for line in lines if line.startswith(("FAILED", "ERROR "))), mutation.test)
        about = f"{mutation.wrong}\n   {failed}" if not args.clean else mutation.test
        print(f"{number:2} {verdict:10} {seconds:4.0f} s  {about}", flush=True)
        if verdict != good:
            print(*lines[-30:], sep="\n", flush=True)
        bad += verdict != good
    print(f"{len(chosen) - bad} of {len(chosen)} {good}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
