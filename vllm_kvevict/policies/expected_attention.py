"""expected-attention: tokens that future queries will attend to, if they are like the prompt's (Devoto et al. 2025).

As in NVIDIA's kvpress 0.5.5. For a query head hq of KV head h, with mu and S the mean and covariance of its queries
before RoPE, those of the sinks left out, and R the mean rotation at the n_future=512 positions after the prompt:

z[hq, i]   = k_i.(R mu) * scale + k_i' (R S R') k_i * scale^2 / 2, log E[exp(q.k_i * scale)] for Gaussian q
p[hq]      = softmax of z[hq] over i >= sinks
s[h, i]    = (mean over hq of p[hq, i] + epsilon) * ||v_i||_2, epsilon=0

The first sinks=4 tokens and the B - sinks best others of each head stay. Without the question, and no window: the last
tokens compete as all others do. A softcap of the logits plays no part.
"""

import torch
from torch import Tensor

from .attention import logit_scale, reduce_group
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import QUERY_MOMENTS, ROTARY, VALUES
from .layer import Comm, LayerInputs, LayerScores
from .params import MILLION, SINKS, integer, limited, real
from .registry import Policy, register
from .sinks import num_sinks
from .tiles import query_moments

PARAMETERS = (SINKS, limited(integer("n_future", 512, 1), 4096), limited(real("epsilon", 0.0), MILLION))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Expected attention times value norms; infinite for the sinks."""
    heads, n, size = inputs.keys.shape
    sinks, scale = num_sinks(cfg, n), logit_scale(inputs)
    turn = inputs.read_rotary().mean(inputs.begins + n, cfg.params["n_future"], size)
    queries = future_queries(query_moments(inputs, sinks), turn)
    means, covariances = (x.unflatten(0, (heads, -1)) for x in queries)
    values = inputs.read(VALUES)
    scores = []
    for head, seen in enumerate(inputs.seen_keys()):
        # A copy: a BLAS may round by where the head lies in memory, which differs between ranks.
        keys = seen[sinks:].to(torch.float32, copy=True)
        logits = [
            expected_logits(keys, mean, covariance, scale)
            for mean, covariance in zip(means[head], covariances[head], strict=True)
        ]
        attention = torch.stack(logits).softmax(1)[:, len(seen) - n :]
        received = reduce_group(attention, "mean", comm) + cfg.params["epsilon"]
        others = received * torch.linalg.vector_norm(values[head, sinks:].float(), dim=1)
        scores.append(torch.cat((others.new_full((sinks,), torch.inf), others)))
    return LayerScores(layer, num_layers, heads, torch.stack(scores), device=values.device)


def future_queries(moments: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [Hq, d] and covariance [Hq, d, d] of queries to come, fp32.

    moments [Hq, d+1, d+1]: as summed up by `tiles`; turn float64 [d, d]: what RoPE makes of a query on average.
    """
    # Where the mean is large, the covariance is what is left of large numbers.
    moments = moments.double() / moments[:, :1, :1].double()
    mean = moments[:, 0, 1:]
    covariance = moments[:, 1:, 1:] - mean[:, :, None] * mean[:, None, :]
    turned = torch.stack([turn @ x @ turn.T for x in covariance])
    return (mean[:, None, :] * turn).sum(2).float(), turned.float()


def expected_logits(keys: Tensor, mean: Tensor, covariance: Tensor, scale: float) -> Tensor:
    """z of one query head: keys fp32 [m, d], mean [d], covariance [d, d] -> [m]."""
    spread = ((keys @ covariance) * keys).sum(1)
    return (keys * mean).sum(1) * scale + spread * (scale * scale / 2)


register(
    Policy(
        "expected-attention",
        "without the question: per head, what queries like the prompt's would attend to, x value norm",
        "Expected Attention; kvpress",
        score,
        best_of_each_head,
        PARAMETERS,
        needs=(VALUES, ROTARY, QUERY_MOMENTS),
        always_kept=("sinks",),
        url="https://arxiv.org/abs/2510.00636",
    )
)
