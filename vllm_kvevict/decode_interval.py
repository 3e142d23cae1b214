"""How often answers are evicted where a server is not told: servers and clients both compute it. Imports nothing."""

LEAST_INTERVAL = 128
"""Tokens from one eviction to the next, at least, where a server is not told otherwise."""


def default_interval(budget: int, page_size: int) -> int:
    """Tokens from one eviction to the next where a server is not told: an eighth of the budget, in whole pages."""
    tokens = max(LEAST_INTERVAL, -(-budget // 8))
    return -(-tokens // page_size) * page_size
