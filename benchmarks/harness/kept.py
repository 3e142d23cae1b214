"""The demo's table of what an eviction kept."""

from rich.table import Table
from rich.text import Text

from benchmarks.harness.tables import table
from vllm_kvevict.schedules.reports import EvictionRecord


def kept_table(eviction: EvictionRecord) -> Table:
    """Entries kept by each layer and KV head of one request."""
    heads_of_layer = max((len(heads) for heads in eviction.heads), default=0)
    columns = ["layer", *(f"KV head {head}" for head in range(heads_of_layer)), "layer kept"]
    title = f"What one request kept of its {eviction.tokens:,} prompt tokens ({eviction.policy})"
    shown = table(title, [], columns)
    shown.caption = f"{eviction.kept:,} of {eviction.stored:,} entries; {eviction.freed_pages:,} pages freed"
    most = max((max(heads) for heads in eviction.heads), default=1)
    for layer, heads in enumerate(eviction.heads):
        share = sum(heads) / (eviction.tokens * len(heads))
        shown.add_row(str(layer), *(_cell(kept, most) for kept in heads), f"{share:.1%}")
    return shown


def _cell(kept: int, most: int) -> Text:
    """A count and a small bar, full at the largest count."""
    blocks = "▏▎▍▌▋▊▉█"
    eighths = round(kept / most * 32)
    bar = "█" * (eighths // 8) + (blocks[eighths % 8 - 1] if eighths % 8 else "")
    return Text.assemble(f"{kept:,} ", (f"{bar:<4}", "cyan"))
