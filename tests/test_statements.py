"""Statements of ARCHITECTURE that name the test which holds them, as `<!-- test_name -->` behind the statement.

Each such test is run once more on code that is wrong on purpose, and must notice; a rule of `test_house.py` is tried on
made-up lines in its own test."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from tests.cache.writers import plain
from tests.documents import ROOT
from vllm_kvevict.cache import PageMemory
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.blocks import NoBlocks
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.extra_tokens import ExtraTokensSlot
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.scheduler import EvictionScheduler
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.schedules.bounds import MemoryBounds

TEXT = (ROOT / "docs/ARCHITECTURE.md").read_text()
MARK = re.compile(r"<!-- (test_\w+) -->")


def places() -> dict[str, list[Path]]:
    """Files of tests by the names of their functions, wherever they lie."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M):
            found.setdefault(name, []).append(path)
    return found


PLACES = places()


def unheld(text: str) -> list[str]:
    """Names behind statements that are no test's, or several tests'."""
    return [name for name in MARK.findall(text) if len(PLACES.get(name, ())) != 1]


def has_block_ids(self: Any, allow_none: bool = False, *, group_ids: Any = None) -> Any:
    return ([7],)


def is_not_cut(self: Any, request: Any, computed: int, tokens: int) -> int:
    return tokens


def promises_do_not_count(self: Books, account: Account, need: Any) -> list[int]:
    pages = zip(self.ranks, self.held, need[0], account.held, strict=True)
    return [held + later - now - rank.pages for rank, held, later, now in pages]


def forgets_admissions(self: Any, admission: Any) -> None:
    """The workers do not hear of them in the step that frees their pages."""


def half(self: MemoryBounds, prompt: Any, by_layer: bool, of: Any = MemoryBounds.until_evicted) -> list[int]:
    return [pages // 2 for pages in of(self, prompt, by_layer)]


def whoever_asks(self: Any, request_id: str) -> bool:
    self._probing, self._repeating = request_id, None
    return True


def any_epoch(self: Any, rank: int, name: str, report: Any, of: Any = PageLedger.on_report) -> None:
    account = self.accounts.get(name)
    epoch = report.epoch if account is None else account.epoch
    of(self, rank, name, type(report)(epoch, *list(vars(report).values())[1:]))


def as_numbers(self: Any, source: Any, to: Any, of: Any = PageMemory.move) -> None:
    of(self, source, to)
    self.storage.nan_to_num_()


def nobody_uses(self: Any, segment: Any, more: int, lasting: bool) -> None:
    """Whoever borrows is not counted."""


def in_order_of_use(self: Any, keep: Any = None) -> Iterator[Any]:
    yield from list(self)


NUMBERS: dict[str, Any] = {"order": plain, "head_dim": 32, "dtype": torch.bfloat16}
POSITION: dict[str, Any] = {"extra_args": {"kv_prefix_len": 700}, "position": 700}
WRONG: dict[str, tuple[type, str, FunctionType, dict[str, Any]]] = {
    "test_block_ids_are_empty_and_never_shared": (NoBlocks, "get_block_ids", has_block_ids, {}),
    "test_replay_is_cut_at_the_same_position": (EvictionScheduler, "_cut_at_eviction", is_not_cut, POSITION),
    "test_a_decode_does_not_take_what_is_promised": (Books, "lacking", promises_do_not_count, {}),
    "test_frees_and_who_relies_on_them_travel_together": (Outbox, "admit", forgets_admissions, {}),
    "test_a_prompt_read_in_one_step_holds_its_bound_until_it_is_reported": (
        MemoryBounds,
        "until_evicted",
        half,
        {},
    ),
    "test_probes_and_repeats_take_turns": (ExtraTokensSlot, "acquire_for_probe", whoever_asks, {}),
    "test_report_of_an_older_admission_is_dropped": (PageLedger, "on_report", any_epoch, {}),
    "test_entries_move_as_bytes_and_nothing_else_changes": (PageMemory, "move", as_numbers, NUMBERS),
    "test_what_is_used_and_what_will_be_is_not_dropped": (SegmentCache, "_use", nobody_uses, {}),
    "test_the_least_recently_used_goes_first_and_none_before_its_followers": (
        SegmentCache,
        "evictable",
        in_order_of_use,
        {},
    ),
}
"""For tests without a control of their own: a method, what is wrong in its place, and the test's parameters."""


def test_statements_name_tests() -> None:
    held = set(MARK.findall(TEXT))
    assert len(held) >= 10 and {*WRONG} <= held
    assert not unheld(TEXT), unheld(TEXT)
    made_up = f"True. <!-- test_made_up --> <!-- {min(WRONG)} -->"
    assert unheld(made_up) == ["test_made_up"]


@pytest.mark.parametrize("name", sorted({*MARK.findall(TEXT)} - {*WRONG}))
def test_other_statements_are_rules_of_the_house(name: str) -> None:
    """Which are tried on made-up lines where they stand."""
    (path,) = PLACES[name]
    (test,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert "assert finds(" in ast.unparse(test)


@pytest.mark.parametrize("name", WRONG)
def test_a_statements_test_notices_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, wrong, parameters = WRONG[name]
    (path,) = PLACES[name]
    test = getattr(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), name)
    test(**parameters)
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        test(**parameters)
