"""Put a server with eviction under random load for a long time, and check that nothing is lost, leaks or hangs.

Starts ``vllm serve`` with much less KV memory than the load needs. All policies, completions and chats, streamed or
not, several answers, log-probabilities, repeated documents, conversations that branch, clients that disconnect, bursts
and malformed requests come at random, and the prefix cache is emptied now and then. Ends with exit code 1 if a
requirement is missed.

With --updates, clients ask about documents and chat while the server's weights are changed and its caches are reset in
all of vLLM's ways; nobody may be answered from KV that was read with earlier weights. With --without-reset the caches
stay as they are: a control that must find wrong answers.

With --hostile, ordinary clients ask short questions beside hostile ones, and beside honest ones with as many tokens;
hostile ones may not slow them down much more. Each round sends --requests of either.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness.hostile import HostileSoak
from benchmarks.harness.options import add_start_patience, positive, whole
from benchmarks.harness.random_soak import RandomSoak
from benchmarks.harness.server import run_benchmark
from benchmarks.harness.soaking import FOLDER, SoakRun
from benchmarks.harness.update_soak import UpdateSoak


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--requests", type=whole, metavar="N", help="how many to send (--hostile: 300)")
    length.add_argument("--minutes", type=positive, metavar="M", help="how long to send requests")
    for kind in ("tensor", "pipeline"):
        about = "as for vllm serve (default: 1)"
        add(f"--{kind}-parallel-size", type=whole, default=1, metavar="N", help=about)
    add("--seed", type=int, default=0, help="seed of the requests (default: %(default)s)")
    add("--check", action="store_true", help="the server compares page counts with pages after every step")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--updates", action="store_true", help="change the weights and reset the cache")
    load.add_argument("--hostile", action="store_true", help="ordinary clients beside hostile ones")
    add("--without-reset", action="store_true", help="with --updates: reset no cache; this run must fail")
    add("--rounds", type=whole, default=3, metavar="N", help="of --hostile (default: %(default)s)")
    add_start_patience(parser)
    add("--name", help=f"write the record to {FOLDER}/NAME.json, not to the project's results")
    arguments = parser.parse_args(argv)
    if arguments.without_reset and not arguments.updates:
        parser.error("--without-reset needs --updates")
    if arguments.hostile:
        arguments.requests = arguments.requests or 300
    if arguments.hostile and arguments.minutes:
        parser.error("--minutes: --hostile sends --requests in --rounds")
    if not arguments.requests and not arguments.minutes:
        parser.error("one of --requests and --minutes is needed")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; the exit code."""
    arguments = parse_arguments(argv)
    kind = UpdateSoak if arguments.updates else HostileSoak if arguments.hostile else RandomSoak
    soak: SoakRun = kind(arguments)
    return run_benchmark(soak.run()) or int(not soak.passed)


if __name__ == "__main__":
    sys.exit(main())
