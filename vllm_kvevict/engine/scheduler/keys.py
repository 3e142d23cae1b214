"""By what shared KV is found: what two requests must have in common for one to go on with what the other left.

Owns nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.schedules.plan import Phase, Plan
from vllm_kvevict.schedules.registry import schedule_of

PrefixKeys = dict[int, Hashable]
"""By what each prefix of a request is found that is evicted on its own, by its tokens, the shortest first."""

UnitKeys = Callable[[int], Hashable]
"""What identifies a prompt's first so many units of tokens, from 1 on."""


def prefix_keys(
    request: Request, plan: Plan, block_size: int, hash_function: Callable[[Any], bytes]
) -> PrefixKeys:
    """What two requests must have in common for one to begin with what the other keeps of a prefix.

    That is how it is evicted, in which parts, what the model is asked if it repeats them, and everything that vLLM's
    own prefix cache compares: tokens, prompt embeddings, ``cache_salt``, the LoRA adapter and images. vLLM hashes
    them block by block; what is left behind the last full block is hashed here likewise.

    Args:
        block_size: tokens of a block that vLLM has hashed.
        hash_function: as of ``--prefix-caching-hash-algo``.

    Returns:
        Of each part of the prompt, with all before it; none of one that ends with the prompt, or that vLLM has not
        hashed.
    """
    keys: PrefixKeys = {}
    before, prompts = None, RequestOptions.of(request.sampling_params).rendered.repeat
    words = None if prompts is None else prompts.to_lists()
    for part in plan.parts:
        if part.end >= request.num_prompt_tokens or len(request.block_hashes) < part.end // block_size:
            break
        tokens = _hash_of_tokens(request, part.end, block_size, hash_function)
        # A digest, so that keys of long chains are no larger than others.
        asked = words if schedule_of(part).repeats_prompt else None
        before = hash_function((before, tokens, *_how(part), asked))
        keys[part.end] = before
    return keys


def _how(part: Phase) -> tuple[Hashable, ...]:
    """Where a part of a prompt begins and ends, and how it is evicted."""
    config = part.config
    kept = config.budget, config.keep_ratio, config.least_window
    return part.begins, part.end, config.policy, *kept, config.items


def _hash_of_tokens(
    request: Request, tokens: int, block_size: int, hash_function: Callable[[Any], bytes]
) -> bytes:
    """Of all that vLLM's prefix cache compares of a request's first tokens."""
    blocks = tokens // block_size
    last_block = request.block_hashes[blocks - 1] if blocks else None
    rest = request.all_token_ids[blocks * block_size : tokens]
    # Of no tokens as well: a request of one block more has another key.
    extra_keys, _ = generate_block_hash_extra_keys(request, blocks * block_size, tokens, 0)
    return hash_block_tokens(hash_function, last_block, rest, extra_keys)


def next_key(
    request: Request, tokens: slice, before: Hashable, hash_function: Callable[[Any], bytes]
) -> Hashable:
    """By what some of a request's tokens are found behind all those before them.

    Args:
        before: by what those before them are found.
    """
    # Its salt and adapter are in the key of the prefix that comes before them all.
    extra_keys, _ = generate_block_hash_extra_keys(request, tokens.start, tokens.stop, 0)
    return hash_function((before, tuple(request.all_token_ids[tokens]), extra_keys))


def unit_keys(block_hashes: Sequence[Hashable], blocks: int) -> UnitKeys:
    """The keys of a request's units, by vLLM's hashes of its blocks, each of which includes those before it.

    Args:
        blocks: of a unit.
    """
    return lambda count: block_hashes[count * blocks - 1]
