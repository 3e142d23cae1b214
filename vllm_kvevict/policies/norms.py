"""How much each token's value can move the layer's output."""

import torch
from torch import Tensor

from .attention import reduce_group
from .inputs import VALUES, W_O
from .layer import Comm, LayerInputs

_BLOCK = 1024


def value_norms(values: Tensor) -> Tensor:
    """L1 norm of each value over the head size: [Hkv, n, d] -> fp32 [Hkv, n]."""
    # Head by head: the whole layer in fp32 does not fit a processor's cache.
    return torch.stack([value.to(torch.float32, copy=True).abs_().sum(1) for value in values])


def projected_norms(inputs: LayerInputs, m: int, comm: Comm | None) -> Tensor:
    """N[h, i] = mean over the query heads hq of KV head h of ||V[h, i] @ Wo[hq]||_1, fp32 [Hkv, m].

    Wo[hq] [d, hidden]: the part of the output projection that the query head feeds. The first m tokens, in
    blocks: memory is 1024 x hidden. As much arithmetic as one output projection of the m tokens.
    Raises ValueError naming values or w_o if missing or of a wrong shape.
    """
    values, w_o = inputs.read(VALUES)[:, :m], inputs.read(W_O)
    grouped = w_o.unflatten(0, (values.shape[0], -1))
    buffer = torch.empty(min(m, _BLOCK), w_o.shape[2], dtype=torch.float32, device=values.device)
    rows = torch.empty(grouped.shape[1], m, dtype=torch.float32, device=values.device)
    norms = []
    for value, heads in zip(values, grouped, strict=True):
        for i, weight in enumerate(heads):
            # Of the model's own weights this is a view, whose layout depends on the heads of this rank.
            projection = weight.float().contiguous()
            for start in range(0, m, _BLOCK):
                block = value[start : start + _BLOCK].float()
                product = torch.mm(block, projection, out=buffer[: len(block)])
                torch.sum(product.abs_(), 1, out=rows[i, start : start + _BLOCK])
        norms.append(reduce_group(rows, "mean", comm))
    return torch.stack(norms)
