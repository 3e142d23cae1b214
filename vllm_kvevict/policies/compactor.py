"""compactor: tokens whose keys are hard to make of others', and that their neighbours attend to, without the question.

Compactor: Chari and Van Durme 2025, where the paper and the authors' code differ as their code. A layer's KV head h:

X[h]       = K[h] @ Phi, keys before RoPE, Phi [d, 48] Gaussian / sqrt(48) and the same for all, minus the mean of each
             chunk of leverage_chunk=512 tokens
l[h, i]    = X_i (X' X + 0.005 I)^-1 X_i' over its chunk: approximate leverage, 0 to 1
a[h, i]    = sum over the query heads of h of what token i receives of the attention within its tile (`tiles`)
s[h, i]    = z(a) + blend * z(l), blend=0.5

z subtracts the mean and divides by the standard deviation (at least 1e-6): of a over all heads and tokens of the layer,
of l over all heads and the tokens of a chunk. The first sinks=16 and the last window=64 tokens of each head stay, and
the layer's best Hkv*(B - sinks - window) others, whichever heads they belong to. The model's logit factor and softcap
play no part.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .attention import add_rows, reduce_group
from .config import EvictionConfig
from .heads import best_of_each_layer
from .inputs import ROTARY, TILE_SUMS
from .layer import Comm, LayerInputs, LayerScores
from .params import MILLION, check_some_stay, first_tokens, integer, limited, real, server_only
from .registry import Policy, register
from .tiles import tile_sums

SKETCH, REGULARIZER, SEED, SMALLEST = 48, 5e-3, 42, 1e-6
PARAMETERS = (
    first_tokens(16),
    integer("window", 64, 0),
    server_only(integer("leverage_chunk", 512, 1)),
    limited(real("blend", 0.5), MILLION),
)


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Attention among neighbours and leverage, both compared with those of the whole layer."""
    n, heads = inputs.num_tokens, inputs.num_kv_heads
    m = n - cfg.window_for(n)
    sums = tile_sums(inputs).unflatten(0, (heads, -1))
    received = torch.stack([reduce_group(rows, "mean", comm) for rows in sums]).double()
    chunks = leverage(inputs, cfg.params["leverage_chunk"])
    unusual = torch.cat([standardized(chunk, comm) for chunk in chunks], 1)
    scores = (standardized(received, comm) + cfg.params["blend"] * unusual)[:, :m].float()
    return LayerScores(layer, num_layers, heads, scores, device=scores.device)


def leverage(inputs: LayerInputs, size: int) -> Iterator[Tensor]:
    """l of each chunk of `size` tokens in turn, float64 [Hkv, tokens]. Raises ValueError naming rotary if unfit.

    In float64: of a short chunk, or of keys that are nearly alike, only what differs in the last digits counts.
    """
    rotary, keys = inputs.read_rotary(), inputs.keys
    phi = projection(keys.shape[2]).to(keys.device)
    for first in range(0, inputs.num_tokens, size):
        before = rotary.undo(keys[:, first : first + size].double(), inputs.begins + first)
        # Head by head, each where a tensor of its own begins: the same bits however many heads are here.
        yield torch.stack([leverage_of(head.clone() @ phi) for head in before])


def projection(size: int) -> Tensor:
    """Phi, float64 [size, 48]; the same numbers in every process."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(size, SKETCH, generator=generator).double() / math.sqrt(SKETCH)


def leverage_of(rows: Tensor) -> Tensor:
    """diag(X (X' X + 0.005 I)^-1 X') of float64 rows [n, 48], X being those less their mean."""
    rows = rows - rows.mean(0)
    gram = rows.t() @ rows
    gram.diagonal().add_(REGULARIZER)
    # Without the check, which would wait for a GPU; what it would find are keys that are no numbers.
    factor, _ = torch.linalg.cholesky_ex(gram)
    return torch.linalg.solve_triangular(factor, rows.t(), upper=False).square().sum(0)


def standardized(rows: Tensor, comm: Comm | None) -> Tensor:
    """float64 [Hkv, m], less the mean of all heads', over their standard deviation."""
    centred = rows - _mean(rows, comm)
    return centred / _mean(centred.square(), comm).sqrt().clamp(min=SMALLEST)


def _mean(rows: Tensor, comm: Comm | None) -> Tensor:
    """Over all entries, also those of heads on other ranks."""
    # Each head's own sum, then those in order: the same bits however the heads lie on ranks.
    sums = torch.stack([row.sum() for row in rows])
    if comm is not None:
        sums = comm.gather_heads(sums)
    return add_rows(sums) / (len(sums) * rows.shape[1])


register(
    Policy(
        "compactor",
        "without the question: unusual keys and attention among neighbours, heads compete",
        "Compactor, authors' code",
        score,
        best_of_each_layer,
        PARAMETERS,
        needs=(ROTARY, TILE_SUMS),
        heads_compete=True,
        always_kept=("window", "sinks"),
        check=check_some_stay,
        url="https://arxiv.org/abs/2507.08143",
    )
)
