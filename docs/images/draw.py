"""Draws the pictures of docs/ARCHITECTURE.md: ``python docs/images/draw.py [FOLDER]``."""

import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

plt.switch_backend("svg")
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvevict", "font.family": "sans-serif"})

INK, SOFT = "#1f2933", "#7b8794"
SCHEDULER, WORKER, GONE = "#d9e8f6", "#dff0e2", "#f6e3d9"
COLOURS = ("#4c86c6", "#5aa469", "#c98a3d", "#8e6bbf")


def canvas(width: float, height: float) -> Axes:
    """Empty axes whose unit is a tenth of an inch."""
    figure, axes = plt.subplots(figsize=(width / 10, height / 10))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    """A box with text in it, left and bottom at (x, y)."""
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=1", fc=colour, ec=INK, lw=0.8
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=INK)


def arrow(
    axes: Axes, start: tuple[float, float], stop: tuple[float, float], text: str = "", above: float = 1.2
) -> None:
    """An arrow, and what travels along it."""
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=9, color=SOFT, lw=1))
    middle = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2 + above
    axes.text(*middle, text, ha="center", fontsize=7, color=SOFT)


def life() -> Axes:
    """A request's way from admission to its end."""
    axes = canvas(104, 44)
    axes.text(2, 40, "scheduler: counts pages", fontsize=9, weight="bold", color=INK)
    axes.text(2, 2, "worker of each rank: places pages", fontsize=9, weight="bold", color=INK)
    steps = [
        ("admit", "peak of the prompt\nis set aside"),
        ("read", "chunks end where\nevictions are due"),
        ("evict", "pages held, from\nthe rank's report"),
        ("decode", "pages_at(tokens):\nexact, no ids"),
        ("end", "all pages\nback"),
    ]
    work = [
        "open a slot",
        "write, attend,\nkeep last queries",
        "score, select,\ncompact, free",
        "append one entry\nto every row",
        "close the slot",
    ]
    for i, ((name, count), done) in enumerate(zip(steps, work, strict=True)):
        x = 2 + 20.5 * i
        axes.text(x + 9, 36.6, name, ha="center", fontsize=8, color=COLOURS[0], weight="bold")
        box(axes, x, 28, 18, 7.5, count, SCHEDULER)
        box(axes, x, 7, 18, 7.5, done, GONE if name == "evict" else WORKER)
        if i + 1 < len(steps):
            arrow(axes, (x + 18, 10.7), (x + 20.5, 10.7))
            arrow(axes, (x + 18, 31.7), (x + 20.5, 31.7))
    arrow(axes, (7, 28), (7, 14.5))
    axes.text(8, 20.5, "plan: policy, budget,\neviction position", fontsize=7, color=SOFT, va="center")
    arrow(axes, (50, 14.5), (50, 28))
    axes.text(51, 20.5, "report: pages, tokens,\nkv_len mod page_size", fontsize=7, color=SOFT, va="center")
    axes.text(78, 20.5, "freed pages admit\nwaiting requests", fontsize=7, color=SOFT, va="center")
    return axes


def tables() -> Axes:
    """Ragged page tables of one request over the pool that all requests share."""
    axes = canvas(104, 46)
    rows = [
        ("layer 0, head 0", 5, 0.4),
        ("layer 0, head 1", 2, 0.9),
        ("layer 1, head 0", 3, 0.2),
        ("layer 1, head 1", 4, 0.7),
    ]
    pages = iter((3, 4, 8, 9, 15, 1, 12, 6, 7, 18, 20, 21, 2, 11))
    used: dict[int, str] = {}
    axes.text(
        2,
        43,
        "page table of a request after its eviction: each row as long as its head needs",
        fontsize=8.5,
        color=INK,
        weight="bold",
    )
    for i, ((name, count, filled), colour) in enumerate(zip(rows, COLOURS, strict=True)):
        y = 36 - 6 * i
        axes.text(2, y + 1.6, name, fontsize=8, color=INK)
        for column in range(count):
            page = next(pages)
            used[page] = colour
            share = filled if column == count - 1 else 1
            axes.add_patch(Rectangle((22 + 8 * column, y), 7 * share, 4, fc=colour, alpha=0.55, lw=0))
            axes.add_patch(Rectangle((22 + 8 * column, y), 7, 4, fill=False, ec=INK, lw=0.8))
            axes.text(25.5 + 8 * column, y + 1.6, str(page), ha="center", va="center", fontsize=8, color=INK)
        axes.text(
            66,
            y + 1.6,
            f"kv_len = {count - 1} full pages, {filled:.0%} of the last",
            fontsize=7.5,
            color=SOFT,
        )
    axes.text(
        2,
        10.5,
        "pool of the rank: one allocation for all layers, heads and requests",
        fontsize=8.5,
        color=INK,
        weight="bold",
    )
    for page in range(24):
        fill = used.get(page, "#e8ecf0" if page in (0, 5, 13, 16, 17) else "white")
        axes.add_patch(Rectangle((2 + 4.2 * page, 4.5), 3.8, 4, fc=fill, alpha=0.7, ec=INK, lw=0.7))
        axes.text(3.9 + 4.2 * page, 6.4, str(page), ha="center", va="center", fontsize=7, color=INK)
    axes.text(
        2,
        1.5,
        "coloured: this request; grey: others; white: free. A page holds page_size tokens of one KV head of one layer.",
        fontsize=7.5,
        color=SOFT,
    )
    return axes


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw, name in ((life, "request-life.svg"), (tables, "page-tables.svg")):
        axes = draw()
        axes.figure.savefig(folder / name, metadata={"Date": None})
        plt.close("all")


if __name__ == "__main__":
    main()
