"""Demo and measurements: they start the real server or engine on small models made on the spot."""

from benchmarks.harness.lower_level import limit_all

limit_all()
