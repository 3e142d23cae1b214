"""A policy in one file: per KV head the tokens whose keys are longest, among every second one.

    python examples/custom_policy.py

In the repository such a file goes into vllm_kvevict/policies/ and its import into __init__.py there; flags, help texts
and the engine then know its name (docs/POLICIES.md says what the tests need). Here it is registered in this process
only.
"""

from collections.abc import Sequence

import torch

from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, decide
from vllm_kvevict.policies.heads import select_uniform
from vllm_kvevict.policies.layer import Comm, Kept
from vllm_kvevict.policies.params import WINDOW, integer
from vllm_kvevict.policies.registry import Policy, register

STRIDE = integer("stride", 2, 1)


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """fp32 scores [Hkv, m] of the m tokens before the window: the larger, the sooner a token is kept."""
    m = inputs.num_tokens - cfg.window_for(inputs.num_tokens)
    scores = torch.linalg.vector_norm(inputs.keys[:, :m].float(), dim=2)
    between = torch.arange(m, device=scores.device) % cfg.params["stride"] != 0
    scores = scores.masked_fill(between, 0.0)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window and the best others of each head, as many in every layer and head."""
    window = cfg.window_for(n)
    return select_uniform(layers, [cfg.budget_for(n) - window] * len(layers), n, window)


register(
    Policy(
        "long-keys",
        "per head, the tokens with the longest keys, among every second one",
        "an example",
        score,
        select,
        (WINDOW, STRIDE),
        always_kept=("window",),
    )
)


def main() -> None:
    random = torch.Generator().manual_seed(0)
    inputs = [LayerInputs(None, torch.randn(2, 60, 16, generator=random)) for _ in range(2)]
    for layer, heads in enumerate(decide(EvictionConfig("long-keys", budget=16, window=8), inputs)):
        for head, kept in enumerate(heads):
            print(f"layer {layer}, KV head {head} keeps {kept.tolist()}")


if __name__ == "__main__":
    main()
