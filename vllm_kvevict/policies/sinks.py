"""How many first tokens always stay, whatever they score."""

from .config import EvictionConfig


def num_sinks(cfg: EvictionConfig, n: int) -> int:
    """First tokens that stay (0 without the parameter); a small ratio shrinks them to fit beside the window."""
    sinks: int = cfg.params.get("sinks", 0)
    budget, window = cfg.budget_for(n), cfg.window_for(n)
    if window < cfg.params.get("window", 0):
        return min(sinks, budget // 2)
    return min(sinks, budget - window)
