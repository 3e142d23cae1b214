"""The draft model of a worker: which layers are its own, and what vLLM is told of the others because of them.

Its layers have vLLM's blocks, and the attention backend that vLLM chooses for them. Owns their names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_kvevict.engine import hooks
from vllm_kvevict.engine.layers import DRAFTERS, goes_first

LOAD = {
    "drafter": "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
    "speculator": "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
}
"""What loads it, by the attribute of vLLM's model runner that has it: V1's and V2's."""


class DraftModel:
    """Of a worker, whose model is not loaded yet; it has no layers without one that has KV of its own.

    Args:
        runner: the worker's model runner, V1 or V2.

    Attributes:
        layers: names of its layers, once it is loaded.
    """

    def __init__(self, runner: Any, vllm_config: VllmConfig):
        self._config = vllm_config
        self._modules = vllm_config.compilation_config.static_forward_context
        self.layers: frozenset[str] = frozenset()
        speculation = vllm_config.speculative_config
        if speculation is None or speculation.method not in DRAFTERS:
            return
        for name, place in LOAD.items():
            if getattr(runner, name, None) is not None:
                hooks.wrap(place, self._loading, of=getattr(runner, name))

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_model(*args: Any, **kwargs: Any) -> Any:
            # vLLM chooses a backend for a draft model anew, but for that of a kind of layers, which is ours.
            attention, before = self._config.attention_config, set(self._modules)
            ours, attention.backend_per_kind = attention.backend_per_kind, {}
            try:
                return load(*args, **kwargs)
            finally:
                attention.backend_per_kind = ours
                self.layers = frozenset(set(self._modules) - before)

        return load_model

    def unlist(self, evicted: Sequence[str], count: int) -> None:
        """Let vLLM's runner leave out the last ``count`` of the evicted layers where it groups layers, and give them
        the memory and the tables of the first."""
        for name in evicted[len(evicted) - count :]:
            self._modules[name].kv_sharing_target_layer_name = evicted[0]

    def in_order(self, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
        """Specs of all layers by their names, in the order that vLLM needs of a draft model's."""
        if not self.layers:
            return dict(specs)
        first = goes_first(self._config)
        return dict(sorted(specs.items(), key=lambda item: (item[0] in self.layers) != first))
