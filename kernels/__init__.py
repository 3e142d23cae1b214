"""Kernels that are faster than what torch and vLLM offer, each beside the torch reference that tests hold it to."""
