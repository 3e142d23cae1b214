"""A compressed prefix, and by what it is found.

:class:`vllm_kvevict.engine.scheduler.shared.compressed.CompressedPrefixes` owns all of them, and alone writes to one.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import repeat_prompts_of
from vllm_kvevict.engine.scheduler.shared.entries import Entry
from vllm_kvevict.schedules.plan import Plan


def prefix_key(
    request: Request, plan: Plan, block_size: int, hash_function: Callable[[Any], bytes]
) -> Hashable | None:
    """What two requests must have in common for one to begin with what the other keeps of its prefix.

    That is how it is evicted, what the model is asked when it repeats it, and everything that vLLM's own prefix cache
    compares: tokens, prompt embeddings, ``cache_salt``, the LoRA adapter and images. vLLM hashes
    them block by block; what is left behind the last full block is hashed here likewise.

    Args:
        block_size: tokens of a block that vLLM has hashed.
        hash_function: as of ``--prefix-caching-hash-algo``.

    Returns:
        None if the request has no prefix that is evicted on its own, or vLLM has not hashed it.
    """
    if plan.prompt is None or len(plan.parts) > 1 or plan.prompt.end >= request.num_prompt_tokens:
        return None
    tokens = plan.prompt.end
    blocks = tokens // block_size
    if len(request.block_hashes) < blocks:
        return None
    last_block = request.block_hashes[blocks - 1] if blocks else None
    rest = request.all_token_ids[blocks * block_size : tokens]
    # Of no tokens as well: a request of one block more has another key.
    extra_keys, _ = generate_block_hash_extra_keys(request, blocks * block_size, tokens, 0)
    key = hash_block_tokens(hash_function, last_block, rest, extra_keys), tokens, plan.prompt.config
    prompts = repeat_prompts_of(request.sampling_params)
    return key if prompts is None else (*key, prompts)


@dataclass(eq=False)
class Prefix(Entry):
    """A prefix that is cached, or is going to be.

    Attributes:
        key: as of :func:`prefix_key`.
        tokens: of the prefix.
        producer: id and epoch of the request that reads it.
        held: pages of each rank that it holds.
        kept: for each rank that has reported, the page count of a request that holds this prefix, as if it borrowed
            nothing.
        full_pages: those of each rank that are full, which all of its borrowers use.
        borrowers: ids of the requests that use them.
        is_storing: whether the step that evicts it was dispatched.
    """

    key: Hashable
    tokens: int
    producer: tuple[str, int]
    held: list[int]
    kept: dict[int, PageCount] = field(default_factory=dict)
    full_pages: list[int] = field(default_factory=list)
    borrowers: set[str] = field(default_factory=set)
    is_storing: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether every rank has stored it."""
        return len(self.kept) == len(self.held)

    @property
    def num_users(self) -> int:
        """How many requests use pages of it: none if they have copied all of them, since none is full."""
        return len(self.borrowers) if any(self.full_pages) else 0

    def freed(self, rank: int) -> int:
        """Pages of a rank that are free once it is dropped; what a single borrower uses becomes that one's own."""
        return self.held[rank] - (self.full_pages[rank] if self.borrowers else 0)

    def keep(self, rank: int, count: PageCount, partial_pages: int) -> None:
        """A rank has stored it; see the attributes."""
        self.kept[rank] = count
        self.full_pages = self.full_pages or [0] * len(self.held)
        self.full_pages[rank] = count.pages - partial_pages
