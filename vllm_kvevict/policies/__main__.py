"""The tables of policies and parameters in docs/POLICY-REFERENCE.md: ``vllm-kvevict policies``."""

import argparse
import sys
from collections.abc import Sequence

from .params import MEANINGS, WINDOW, Parameter
from .registry import available, decoding_policies, lookup


def known() -> tuple[str, ...]:
    """Policies for prompts, and behind them those for answers alone."""
    return (*available(), *(name for name in decoding_policies() if not lookup(name).prompts))


def policy_table() -> str:
    """All policies in Markdown: what each keeps, of what, where it comes from, its parameters with their defaults."""
    rows = ["| policy | keeps | of | source | parameters |", "|---|---|---|---|---|"]
    for name in known():
        policy = lookup(name)
        evicted = ", ".join(["prompts"] * policy.prompts + ["answers"] * policy.decodes)
        mark = " (experimental)" if policy.experimental else ""
        settings = ", ".join(f"`{parameter.setting}`" for parameter in policy.parameters)
        source = f"[{policy.source}]({policy.url})" if policy.url else policy.source
        rows.append(f"| `{name}`{mark} | {policy.summary} | {evicted} | {source} | {settings} |")
    return "\n".join(rows)


def parameter_table() -> str:
    """All parameters in Markdown: accepted values, those that one request may give, and meaning."""
    rows = ["| parameter | values | per request | meaning |", "|---|---|---|---|"]
    # Where policies accept different values, as the first of them does.
    first = {p.name: p for name in reversed(known()) for p in lookup(name).parameters}
    for name, meaning in MEANINGS.items():
        rows.append(f"| `{name}` | {first[name].expects} | {by_request(first[name])} | {meaning} |")
    return "\n".join(rows)


def by_request(parameter: Parameter) -> str:
    """Whether one request may set a parameter, and how high."""
    if not parameter.by_request:
        return "no"
    if parameter.name == WINDOW.name:
        return "up to `max_window`"
    return "yes" if parameter.most_by_request is None else f"up to {parameter.most_by_request:,}"


def main(words: Sequence[str] | None = None, program: str = "python -m vllm_kvevict.policies") -> int:
    """Print both tables; the exit code."""
    parser = argparse.ArgumentParser(
        program, description="Prints all policies and their parameters, in Markdown."
    )
    parser.parse_args(words)
    print(policy_table(), parameter_table(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
