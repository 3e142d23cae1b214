"""Benchmarks that need a CUDA device, each ``python -m benchmarks.gpu.NAME``."""
