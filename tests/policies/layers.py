"""Random inputs of a model's layers, with all that any policy reads."""

import dataclasses

import torch

from vllm_kvevict.policies import LayerInputs, parameters


def model_inputs(
    seed: int, layers: int, heads: int, group: int, n: int, size: int, window: int
) -> list[LayerInputs]:
    """Of `layers` layers with so many KV heads, each with a group of query heads, for a prompt of n tokens."""
    g = torch.Generator().manual_seed(seed)
    angles = torch.arange(n)[:, None] * 0.5 ** torch.arange(size // 2)
    result = []
    for _ in range(layers):
        q_all = torch.randn(heads * group, n, size, generator=g)
        k, v = torch.randn(2, heads, n, size, generator=g)
        w_o = torch.randn(heads * group, size, 24, generator=g)
        x = LayerInputs(q_all[:, -window:], k, v, q_all=q_all, w_o=w_o, rotary=(angles.cos(), angles.sin()))
        result.append(repeated(x))
    return result


def repeated(x: LayerInputs) -> LayerInputs:
    """With what repeating paid: a row of each query head, of which those that are here give the most.

    No more than a window pays, or that would not count beside it.
    """
    rows = x.q_all.sum(2).abs().unflatten(0, (x.num_kv_heads, -1)).amax(1) / 200
    return dataclasses.replace(x, repeated=rows)


def those_of(policy: str, **sizes: int) -> dict[str, int]:
    """Of these sizes the ones that are parameters of a policy."""
    return {name: size for name, size in sizes.items() if name in parameters(policy)}
