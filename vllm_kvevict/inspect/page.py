"""The page: one HTML file with its style, its script and its data, which loads nothing from elsewhere.

Positions are bit sets, one for each layer and head: bit ``i % 8`` of byte ``i // 8`` is token ``i``. Those of a policy
lie behind each other, are compressed with zlib and written in base64.
"""

import base64
import json
import zlib
from importlib import resources
from typing import Any

import numpy as np

from vllm_kvevict.inspect.data import Inspection

SCRIPTS = ("kept.js", "map.js", "heads.js", "turns.js", "text.js", "page.js")
"""Files of the page's script, in their order."""


def render(inspection: Inspection) -> str:
    """The page's HTML."""
    page = _file("page.html")
    for mark, text in {
        "/* style */": _file("page.css"),
        "/* script */": "\n".join(map(_file, SCRIPTS)),
        "/* data */": _json(_content(inspection)),
    }.items():
        before, after = page.split(mark)
        page = before + text + after
    return page


def _content(inspection: Inspection) -> dict[str, Any]:
    """What the script reads, of a branch as well."""
    content = inspection.summary()
    for policy, kept in zip(content["policies"], inspection.kept, strict=True):
        policy["bits"] = pack(kept.mask)
    if inspection.branch is not None:
        content["branch"] = _content(inspection.branch)
    return content


def pack(mask: np.ndarray) -> str:
    """Bit sets of a mask [layers, heads, tokens], see above."""
    bits = np.packbits(mask, axis=-1, bitorder="little")
    return base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode()


def _json(content: dict[str, Any]) -> str:
    """JSON that no prompt can break out of: a `<` would end the element that it stands in."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return (resources.files(__package__) / "web" / name).read_text("utf-8")
