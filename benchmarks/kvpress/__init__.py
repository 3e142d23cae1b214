"""This project beside NVIDIA's kvpress on Hugging Face transformers: ``python -m benchmarks.kvpress``."""
