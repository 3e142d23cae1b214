"""The page holds what was inspected, and nothing of it can be misread; what is printed of a conversation's turns."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.inspection.pages import branching, conversation, random_inspection, read
from vllm_kvevict.inspect.data import Prompt
from vllm_kvevict.inspect.page import render
from vllm_kvevict.inspect.turns import lines_of

INSPECTION = random_inspection(203, 3, 2)


def test_page_and_json_say_the_same():
    content = read(render(INSPECTION))
    assert content == json.loads(json.dumps(INSPECTION.to_json()))
    for policy, kept in zip(content["policies"], INSPECTION.kept, strict=True):
        assert policy["policy"] == kept.policy
        for layer, heads in enumerate(policy["kept"]):
            for head, positions in enumerate(heads):
                assert positions == np.flatnonzero(kept.mask[layer, head]).tolist()


def test_page_and_json_say_the_same_of_a_branch():
    inspection = branching()
    content = read(render(inspection))
    assert content == json.loads(json.dumps(inspection.to_json()))
    assert content["turns"] == [40, 90] and content["shared_turns"] == 1
    for side in (content, content["branch"]):
        for policy in side["policies"]:
            positions = [token for layer in policy["kept"] for head in layer for token in head]
            bounds = [0, *side["turns"], side["prompt_tokens"]]
            of_turns = [sum(start <= x < end for x in positions) for start, end in pairwise(bounds)]
            assert policy["entries_per_turn"] == of_turns


def test_totals_are_those_of_the_sets():
    for policy in read(render(INSPECTION))["policies"]:
        counts = [[len(head) for head in layer] for layer in policy["kept"]]
        assert policy["entries_per_head"] == counts
        assert policy["entries"] == {"kept": sum(map(sum, counts)), "of": 3 * 2 * 203}
        pages = sum(-(-count // 32) for layer in counts for count in layer)
        assert policy["bytes"] == {"before": 3 * 2 * 7 * 4096, "after": pages * 4096}


def test_no_prompt_breaks_out_of_the_page():
    texts = ["</script>", "<!--", "<script>", "\u2028&amp;", '"\\', "/* style */", "/* script */"]
    inspection = random_inspection(len(texts), 1, 1, words=texts)
    html = render(inspection)
    assert read(html)["token_texts"] == texts
    # Only the page's own: its data and its script.
    assert len(re.findall("</script>", html)) == 2 and html.count("<!--") == 0


def test_the_page_loads_nothing():
    html = render(INSPECTION)
    assert not re.findall(r"(?:src|href)=\"(?!data:,)|url\(|@import|https?:|//[a-z]+\.", html)
    assert "default-src 'none'" in html


def test_the_text_of_a_prompt_leaves_out_what_the_tokenizer_added():
    assert Prompt([1, 2, 3], ["<s>", "Hello", " you"], [0]).text == "Hello you"


# What is printed of a conversation.


def cells(line):
    return line.replace(" %", "%").split()


def test_a_line_for_each_turn():
    inspection = conversation()
    names, first, second, rest = map(cells, lines_of(inspection))
    assert names == ["turn", "tokens", "ada-snapkv", "lava", "snapkv"]
    assert [first[:2], second[:2], rest[:2]] == [["1", "40"], ["2", "50"], ["rest", "40"]]
    for column, kept in enumerate(inspection.kept, 2):
        masks = kept.mask[:, :, :40], kept.mask[:, :, 40:90], kept.mask[:, :, 90:]
        assert [line[column] for line in (first, second, rest)] == [
            f"{100 * mask.mean():.1f}%" for mask in masks
        ]
    # A control: another end, other shares.
    assert lines_of(replace(inspection, turns=(41, 90)))[1] != lines_of(inspection)[1]


@pytest.mark.parametrize(
    ("turns", "differs_at", "shared"),
    [
        ((40, 90), 90, 2),
        ((40, 90), 89, 1),
        ((40, 90), 0, 0),
        ((40, 91), 130, 1),
        ((39, 90), 130, 0),
        ((40,), 130, 1),
    ],
)
def test_turns_are_shared_that_end_alike_behind_the_same_tokens(turns, differs_at, shared):
    first = conversation()
    ids = [*first.prompt.ids[:differs_at], *(5 for _ in first.prompt.ids[differs_at:])]
    branch = replace(first, turns=turns, prompt=replace(first.prompt, ids=ids))
    assert replace(first, branch=branch).shared_turns == shared
