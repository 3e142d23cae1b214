"""What is counted as waste, on objects whose size is known; no engine is started."""

import re
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from benchmarks import waste
from benchmarks.harness.scenarios import BLOCK, token_bytes
from benchmarks.waste import Sample, object_bytes, parse_arguments, summary, targets
from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.cache.lengths import RowLengths
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.tables import PageTables

GOOD = Sample([100, 129], entries=960, pages=31, page_size=32, page_bytes=8192, metadata={"tables": 1000})


@dataclass
class Node:
    value: object


def test_every_object_counts_once():
    shared = [1000001, 1000002]
    alone = object_bytes(shared)
    assert alone == sys.getsizeof(shared) + sum(map(sys.getsizeof, shared))
    assert object_bytes([shared, shared]) == sys.getsizeof([shared, shared]) + alone
    node = Node(None)
    node.value = node  # a circle ends
    assert object_bytes(node) == sys.getsizeof(node) + sys.getsizeof(node.__dict__) + sys.getsizeof("value")


def test_arrays_count_with_their_contents_and_classes_do_not():
    assert object_bytes(torch.zeros(10, dtype=torch.int32)) == 40
    assert object_bytes({"a": np.zeros(10)}) == sys.getsizeof({"a": 0}) + sys.getsizeof("a") + 80
    assert object_bytes(Node) == object_bytes(parse_arguments) == 0


def test_all_arrays_of_the_cache_are_found():
    tables, pool, lengths = PageTables(4, 8, "cpu"), PagePool(100, "cpu"), RowLengths(4, 2, 4, 32)
    assert tables.nbytes < object_bytes(tables) < tables.nbytes + 1500
    assert 5 * 100 < object_bytes(pool) < 5 * 100 + 1500  # an int32 and an int8 a page
    assert 4 * (8 + 32 + 4) * 8 < object_bytes(lengths) < 4 * (8 + 32 + 4) * 8 + 2500
    assert object_bytes(PageCount.start(8, 32)) > 33 * 8  # with its tuple


def test_shares_of_a_sample():
    assert GOOD.live == 960 / 992 and GOOD.overhead == 1000 / (31 * 8192)
    assert GOOD.stock_bytes == 3 * BLOCK * token_bytes("bfloat16")  # 100 tokens take one block, 129 two
    assert replace(GOOD, page_bytes=16384).stock_bytes == 3 * BLOCK * token_bytes("float32")


def test_the_worst_step_counts():
    samples = [GOOD, replace(GOOD, entries=900), replace(GOOD, metadata={"tables": 9000})]
    figures = summary(samples)
    assert figures["live_after_evictions"] == GOOD.live and figures["live_worst"] == 900 / 992
    assert figures["live_worst"] < figures["live_mean"] < GOOD.live
    assert figures["metadata_worst"] == 9000 / (31 * 8192) and figures["metadata_worst_bytes"] == {
        "tables": 9000
    }
    assert [target.met for target in targets({"a": summary([GOOD])})] == [True, True]
    assert [target.met for target in targets({"a": summary([GOOD]), "b": figures})] == [False, False]
    assert [len(table.rows) for table in waste.tables({"a": figures, "b": figures})] == [2, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        "--requests 0",
        "--output-len 0",
        "--budget 32",
        "--budget 2048",
        "--page-size 48",
        "--input-len 100 --budget 50",
    ],
)
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
