"""Pages made without an engine, and what a page says, read back from its HTML."""

import base64
import json
import re
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_kvevict.inspect.data import Inspection, Kept, Prompt

POLICIES = ("ada-snapkv", "lava", "snapkv")


def random_inspection(
    tokens: int,
    layers: int,
    heads: int,
    policies: tuple[str, ...] = POLICIES,
    *,
    words: list[str] | None = None,
    **changes: Any,
) -> Inspection:
    """Random sets of random sizes over a prompt of random words, with a line break now and then."""
    rng = np.random.default_rng(tokens)
    if words is None:
        breaks = rng.random(tokens) < 0.05
        words = [("\n" if breaks[i] else " " if i else "") + f"word{i}" for i in range(tokens)]
    shares = rng.random((len(policies), layers, heads, 1)) * 0.4
    masks = [rng.random((layers, heads, tokens)) < share for share in shares]
    settings: dict[str, Any] = {
        "model": "a model",
        "prompt": Prompt(list(range(100, 100 + tokens)), words, []),
        "evicted_tokens": tokens,
        "layers": list(range(layers)),
        "page_size": 32,
        "page_bytes": 4096,
        "kept": [Kept(policy, 0.2, mask) for policy, mask in zip(policies, masks, strict=True)],
    }
    return Inspection(**{**settings, **changes})


def conversation(tokens: int = 130, turns: tuple[int, ...] = (40, 90), first: int = 100) -> Inspection:
    """A conversation of so many tokens, whose ids begin with ``first``."""
    made = random_inspection(tokens, 3, 4, turns=turns, evicted_tokens=turns[-1])
    return replace(made, prompt=replace(made.prompt, ids=[first + i for i in range(tokens)]))


def branching() -> Inspection:
    """A conversation of two turns, and one that has the first of them."""
    first, branch = conversation(), conversation(150, (40, 100))
    ids = first.prompt.ids[:60] + branch.prompt.ids[61:] + [7]
    return replace(first, branch=replace(branch, prompt=replace(branch.prompt, ids=ids)))


def read(html: str) -> dict[str, Any]:
    """The data of a page, with the positions of each policy as ``kept[layer][head]``, and the same of its branch."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return unpacked(json.loads(text))


def unpacked(content: dict[str, Any]) -> dict[str, Any]:
    if "branch" in content:
        unpacked(content["branch"])
    tokens, heads = content["prompt_tokens"], content["kv_heads"]
    row_bytes = -(-tokens // 8)
    for policy in content["policies"]:
        rows = zlib.decompress(base64.b64decode(policy.pop("bits")))
        assert len(rows) == row_bytes * heads * len(content["layers"])
        sets = [
            [i for i in range(8 * row_bytes) if rows[start + i // 8] >> i % 8 & 1]
            for start in range(0, len(rows), row_bytes)
        ]
        policy["kept"] = [sets[first : first + heads] for first in range(0, len(sets), heads)]
    return content
