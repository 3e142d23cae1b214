"""Which policy evicts answers where nobody says so, and with what window. Owns nothing."""

from .registry import decoding_policies, lookup, parameters

DEFAULT = "ada-snapkv"
"""The policy for answers where that for prompts cannot evict them."""
WINDOW = 16
"""Last tokens of an answer that stay, with policies that are made for prompts."""


def policy_for_answers(prompts: str) -> str:
    """The policy that evicts answers where a server says nothing of it.

    prompts: the policy for prompts.
    """
    return prompts if prompts in decoding_policies() else DEFAULT


def default_window(policy: str) -> int:
    """Last tokens of an answer that stay where nothing is said of that; of policies for answers alone their default."""
    window = parameters(policy).get("window", 0)
    return WINDOW if lookup(policy).prompts else int(window)
