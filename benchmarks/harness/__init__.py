"""What the benchmarks share: servers, engines, loads, scenarios, statistics, records. No commands."""
