"""Times one part of the project, or compares it with vLLM's: ``python -m benchmarks.micro NAME``.

``python -m benchmarks.micro NAME --help`` lists the options of a name.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.micro.loop import run

NAMES = {
    "attention": "decode attention over part of the KV and over all of it",
    "breakdown": "where the time of an engine step goes",
    "decode": "a step of pure decode at long context, stock vLLM and eviction",
    "drafts": "accepted tokens of draft models, by budget",
    "eviction": "how long evictions take, as a share of the prefill",
    "frontend": "what looking for questions and turns adds to a chat",
    "ledger": "the scheduler's page accounts and vLLM's block manager",
    "prompts": "attention of a prompt by vLLM's op and by our kernel",
    "quantised": "prompts and decode steps in 8 bits and in the model's dtype",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is named first; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro",
        description=__doc__,
        epilog=". ".join(f"{name}: {about}" for name, about in NAMES.items()),
    )
    parser.add_argument("name", choices=NAMES)
    given = list(sys.argv[1:] if argv is None else argv)
    name = parser.parse_args(given[:1]).name
    return run(name, import_module(f"benchmarks.micro.{name}"), given[1:])


if __name__ == "__main__":
    sys.exit(main())
