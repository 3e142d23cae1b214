"""LoRA adapters of requests in flight. Owns who uses which: a server has slots for ``--max-loras`` of them."""

from collections import Counter

from vllm.v1.request import Request


class AdapterSlots:
    """Which adapters requests in flight use.

    vLLM looks only at requests that the step computes, and stops if a step uses too many. Ours may be left out of a
    step, until their evictions are reported or while others pause, and need their adapters in a later one.

    Args:
        most: adapters that a step may use; 0 without LoRA.
    """

    def __init__(self, most: int):
        self.most = most
        self._refs: Counter[int] = Counter()
        """Requests by the number of their adapter."""

    def has_slot(self, request: Request) -> bool:
        """Whether a waiting request may use its adapter, if it has one, beside those in flight."""
        if request.lora_request is None:
            return True
        return len(self._refs) < self.most or request.lora_request.lora_int_id in self._refs

    def acquire(self, request: Request) -> None:
        """A request was admitted."""
        if request.lora_request is not None:
            self._refs[request.lora_request.lora_int_id] += 1

    def release(self, request: Request) -> None:
        """A request that was admitted finished, was aborted or preempted."""
        if request.lora_request is None:
            return
        number = request.lora_request.lora_int_id
        self._refs[number] -= 1
        if not self._refs[number]:
            del self._refs[number]
