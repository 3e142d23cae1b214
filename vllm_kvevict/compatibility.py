"""Which versions of vLLM this package works with; needs no vLLM."""

TESTED_VLLM = "0.32."
"""Prefix of the vLLM versions whose internals this package was tested against."""


def refusal(found: str) -> str | None:
    """Why eviction does not run in this version of vLLM, in one sentence; None where it does."""
    if found.startswith(TESTED_VLLM):
        return None
    return f"--kv-eviction supports vLLM {TESTED_VLLM}*, found {found}: install that one"
