"""The command line ``vllm-kvevict``: each command is a module, imported when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from vllm_kvevict import __version__

COMMANDS = {
    "policies": ("vllm_kvevict.policies.__main__", "print all policies and their parameters"),
    "sizing": ("vllm_kvevict.sizing", "compute how many requests fit, with and without eviction"),
    "inspect": (
        "vllm_kvevict.inspect.__main__",
        "show on a web page which tokens of a prompt each policy keeps",
    ),
    "quality": ("vllm_kvevict.quality.__main__", "measure how eviction changes the quality of answers"),
    "doctor": ("vllm_kvevict.doctor", "check this installation, and whether it can serve a model"),
}
"""By name: the module, whose ``main(words, program)`` returns an exit code or None, and what the help says of it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

NOBODY_READS = 141
"""Exit code where the reader of the output has gone, such as `head`; as shells have it."""


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command's name; all that follows is the command's own."""
    lines = [f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "vllm-kvevict",
        description="KV cache eviction for vLLM. Servers are started with: vllm serve MODEL --kv-eviction POLICY",
        epilog="\n".join(
            ("commands:", *lines, "", "vllm-kvevict COMMAND --help lists the command's options.")
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its options")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command, by default the one of ``sys.argv``; the exit code."""
    try:
        try:
            return run(parse_arguments(words))
        finally:
            print(end="", flush=True)  # what Python writes at its end, it also complains about
    except BrokenPipeError:
        # What is left to write must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was asked for; the exit code."""
    program = f"vllm-kvevict {arguments.command}"
    try:
        module = importlib.import_module(COMMANDS[arguments.command][0])
        return module.main(arguments.words, program) or 0
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if str(error.name).startswith("vllm_kvevict"):
            raise
        advice = (
            "install vllm-kvevict with its extra `quality`"
            if arguments.command == "quality"
            else "install it"
        )
        print(f"{program}: error: {error.name} is not installed: {advice}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
