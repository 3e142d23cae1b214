"""Memory for what prompts add up to while they are read: set aside at start-up, shared out by the scheduler.

A policy that reads ``col_sums`` holds fp32 [layers, query heads, tokens] of a request from its first step to its
eviction: 512 MiB for a prompt of 128k tokens of a Llama of 8B. Others hold as much or less (``schedules/inputs.py``).
Clients decide when that happens, and the KV cache has taken what memory was free. So a worker of a server that allows
such policies takes as much as one prompt of ``max_model_len`` needs before vLLM measures what is left for the KV cache,
and the scheduler lets no more in. A prompt that one step reads whole needs none: its queries are all there
when a layer is scored. Owns who has which place: no two overlap, and none ends behind the reserve.
"""


class Reserve:
    """Which part of the ranks' reserves belongs to which request; the same on every rank.

    Args:
        size: of the reserve, in numbers for each layer and query head.
    """

    def __init__(self, size: int):
        self.size = size
        self.spans: dict[str, range] = {}

    def find(self, size: int) -> int | None:
        """The first place with room for so much, None when requests in flight have to be evicted first."""
        start = 0
        for span in sorted(self.spans.values(), key=lambda span: span.start):
            if start + size <= span.start:
                break
            start = span.stop
        return start if start + size <= self.size else None

    def acquire(self, request_id: str, place: int, size: int) -> None:
        """Give a request its place."""
        self.spans[request_id] = range(place, place + size)

    def release(self, request_id: str) -> None:
        """A request was evicted, finished, aborted or preempted."""
        self.spans.pop(request_id, None)
