"""Demo and measurements: they start the real server or engine on small models made on the spot."""

import sys
from collections.abc import Sequence
from itertools import pairwise

MICRO = ("attention", "breakdown", "decode", "eviction", "frontend", "ledger", "prompts")
MOVED = {
    **{name: f"micro {name}" for name in MICRO},
    "hostile": "soak --hostile",
    "prefill": "throughput --sweep context --output-len 1 --policy POLICY",
    "reasoning": "throughput reasoning-long, and reasoning-fits",
    "speculation": "throughput speculation-copy",
    "waste": "throughput (its columns KV MiB and live MiB)",
}
"""Commands that records name, and what took their place."""


def refuse_moved(words: Sequence[str]) -> None:
    """End a process whose words ask for a command that has moved; Python imports this package first."""
    for option, module in pairwise(words):
        name = module.removeprefix("benchmarks.")
        if option == "-m" and module != name and name in MOVED:
            sys.exit(f"python -m {module} is now: python -m benchmarks.{MOVED[name]}")


refuse_moved(sys.orig_argv)
