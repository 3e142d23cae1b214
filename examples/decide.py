"""What policies would keep for given keys and queries; this needs only torch, no vLLM.

python examples/decide.py
"""

import torch

from vllm_kvevict.policies import EvictionConfig, LayerInputs, decide

LAYERS, QUERY_HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 8, 2, 500, 64


def main() -> None:
    random = torch.Generator().manual_seed(0)
    layers = []
    for layer in range(LAYERS):
        keys = torch.randn(KV_HEADS, TOKENS, HEAD_DIM, generator=random)
        keys[0, 100:110] *= 3 + layer  # one head of each layer looks at ten tokens above all
        layers.append(
            LayerInputs(
                q_window=torch.randn(QUERY_HEADS, 32, HEAD_DIM, generator=random),
                keys=keys,
                values=torch.randn(KV_HEADS, TOKENS, HEAD_DIM, generator=random),
            )
        )
    for policy in ("streaming-llm", "snapkv", "pyramidkv", "ada-snapkv", "lava"):
        kept = decide(EvictionConfig(policy, keep_ratio=0.2), layers)
        counts = "   ".join("/".join(str(len(head)) for head in layer) for layer in kept)
        print(f"{policy:14} entries kept per KV head, layer by layer: {counts}")


if __name__ == "__main__":
    main()
