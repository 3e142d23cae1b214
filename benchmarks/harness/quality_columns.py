"""Which server can serve which policy of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvevict.policy_list import parse


@dataclass(frozen=True)
class Columns:
    """A policy whose parameters its server is started with.

    Attributes:
        label: what results call it.
        flags: of its server.
    """

    label: str
    flags: list[str]


def split(policies: Sequence[str]) -> tuple[list[str], list[str]]:
    """Policies without parameters, and those with them."""
    tuned = [entry for entry in policies if parse(entry).texts]
    return [entry for entry in policies if entry not in tuned], tuned


def own_columns(tuned: Sequence[str]) -> list[Columns]:
    """A server for each policy with parameters; the parameters become the note of its name."""
    found = []
    for entry in map(parse, tuned):
        flags = ["--kv-eviction", entry.policy]
        for name, text in entry.texts:
            flags += [f"--kv-eviction-config.{name}", text]
        note = " ".join(filter(None, [entry.field, entry.note]))
        found.append(Columns(f"{entry.policy}@{note}", flags))
    return found
