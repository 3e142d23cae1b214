"""On every rank: pages, attention over them, evictions. Follows the scheduler's plans and reports what it holds."""
