"""tova: the tokens that the last token attends to most (TOVA: Oren et al. 2024).

s[i] = mean over all query heads of the layer of the attention of token n-1 to token i, no pooling; after a lookahead
       over its tokens as well

The last token always stays, so that each head keeps it and the B - 1 best of the n - 1 others, the same ones in
every KV head of the layer. The paper repeats this at every decoding step; here it is done once, after the prompt.
"""

import torch

from .attention import add_rows, received, reduce_group
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import Q_WINDOW
from .layer import Comm, LayerInputs, LayerScores
from .registry import Policy, register


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Attention of the last query, or of those of a lookahead."""
    heads, window = inputs.num_kv_heads, cfg.window_for(inputs.num_tokens)
    scores = torch.stack([reduce_group(rows, "mean", comm) for rows in received(inputs, window)])
    # Groups are of one size: the mean of their means is that of all heads. Every rank adds in head order.
    means = scores if comm is None else comm.gather_heads(scores)
    scores = add_rows(means).div_(len(means)).repeat(heads, 1)
    return LayerScores(layer, num_layers, heads, scores, device=scores.device)


register(
    Policy(
        "tova",
        "what the last token attends to most, the same in all heads of a layer",
        "TOVA",
        score,
        best_of_each_head,
        needs=(Q_WINDOW,),
        window_rows="mean",
        last=1,
        url="https://arxiv.org/abs/2401.06104",
    )
)
