"""Check mode: what the ledger knows is compared with what a rank really holds. Owns nothing."""

from collections.abc import Mapping
from itertools import chain

from vllm_kvevict.engine.messages import Holdings
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.nodes import Prefix
from vllm_kvevict.engine.scheduler.shared.store import SharedStore


def verify(
    rank: int,
    index: int,
    actual: Holdings,
    accounts: Mapping[str, Account],
    books: Books,
    shared: SharedStore,
) -> None:
    """Compare with what a rank holds at the end of its step.

    A count that a step in flight will make true, some tokens later, may be higher by what the rows take until then even
    if they drop nothing, and by all but one entry of a page for each row, which may end anywhere: no eviction adds
    entries. Every other count is exact.

    Args:
        rank, index: its global rank, and its place in what is counted for each rank. With the first one, all that is
            counted of shared entries is counted anew.

    Raises:
        RuntimeError: naming the first request whose counts differ.
    """
    for request_id, (epoch, tokens, pages) in actual.requests.items():
        account = accounts.get(request_id)
        if account is None or account.epoch != epoch:
            continue
        pending = account.pending
        if pending is not None and pending.by_bound and index in pending.unreported:
            continue
        count, what = account.counts[index], f"request {request_id} at {tokens} tokens"
        ahead = count.tokens - tokens
        if ahead <= 0:
            _compare(rank, what, pages, count.at(tokens))
        elif count.pages > pages + count.rows * (ahead + count.page_size - 1) // count.page_size:
            _compare(rank, what, pages, count.pages)
    _verify_cached(rank, index, actual.prefixes, shared)
    if index == 0:
        shared.check()
    total = sum(account.held[index] for account in accounts.values())
    if total != books.used[index]:
        raise RuntimeError(
            f"kv eviction check: ledger of rank {rank} sums to {total}, not {books.used[index]}"
        )


def _verify_cached(rank: int, index: int, actual: Mapping[int, int], shared: SharedStore) -> None:
    """Compare what is cached with what a rank holds of it: pages by number."""
    for node in chain.from_iterable(shared.kinds):
        pages = actual.get(node.number, 0)
        # All ranks have said that they made a prefix; a step in flight may be to make what is not one.
        is_made = node.is_ready if isinstance(node, Prefix) else pages or rank in node.seen_on
        if is_made:
            _compare(rank, f"{node.kind} {node.number}", pages, node.held[index])
            node.seen_on.add(rank)


def _compare(rank: int, what: str, pages: int, expected: int) -> None:
    if pages != expected:
        raise RuntimeError(
            f"kv eviction check: rank {rank} holds {pages} pages of {what}, the ledger expects {expected}"
        )
