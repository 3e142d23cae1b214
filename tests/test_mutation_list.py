"""The list of faults does not rot: each can still be made, and the file that must notice it is there."""

import pytest

from tests.mutations import ROOT, Mutation, mutations


@pytest.mark.parametrize("mutation", [pytest.param(x, id=f"{n}") for n, x in enumerate(mutations(), 1)])
def test_a_fault_can_be_made(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.file
    assert (ROOT / mutation.test).is_file(), mutation.test
    assert mutation.old != mutation.new and mutation.wrong.endswith(".")
