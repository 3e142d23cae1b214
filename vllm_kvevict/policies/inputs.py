"""What policies read besides keys: the inputs of a layer, each with its name, its shape and what it needs of the model.

A policy lists its inputs in `Policy.needs` and reads them by `LayerInputs.read`. How the engine collects an input, and
what it reserves for that, stands in `vllm_kvevict/schedules/inputs.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ModelPart:
    """Something of the model that inputs are made of, and that not every model has.

    words: what a policy needs, for messages. weights: which weights it is, where it is some: a quantization hides them,
    and adapters change them.
    """

    words: str
    weights: str | None = None


PROJECTIONS = ModelPart("unquantized output projections", "each layer's output projection")
ROTARY_EMBEDDING = ModelPart(
    "a rotary embedding that depends on the position alone and is the same in every layer"
)


@dataclass(frozen=True, eq=False)
class Input:
    """A field of `LayerInputs`.

    name: of the field. dims: its dimensions, by their names in `LayerInputs`; d_v is the size of a value. meaning: what
    it is, for messages. fp32: whether no other dtype fits. parts: its tensors' names if it is several of one shape.
    of_model: what it needs of the model. instead: what policies compute it from where it is not given.
    """

    name: str
    dims: str
    meaning: str
    fp32: bool = False
    parts: tuple[str, ...] = ()
    of_model: ModelPart | None = None
    instead: "Input | None" = None

    @property
    def by_kv_head(self) -> bool:
        """Whether there is one for each KV head, rather than for each query head."""
        return self.dims.startswith("Hkv")

    def check(self, given: object, sizes: Mapping[str, range]) -> None:
        """Raise ValueError naming the field and its shape if it is missing, or of another shape or dtype.

        sizes: of dimensions those that are valid; of others any is.
        """
        dims = self.dims.split()
        form = f"({', '.join(self.parts)}), each " if self.parts else "fp32 " if self.fp32 else ""
        if given is None:
            other = f", or {self.instead.name}" if self.instead else ""
            raise ValueError(f"{self.name} is required: {self.meaning}, {form}[{', '.join(dims)}]{other}")
        tensors: list[Any] = (
            list(given)[: len(self.parts)] if isinstance(given, Iterable) and self.parts else [given]
        )
        if all(self._fits(x, dims, sizes) and x.shape == tensors[0].shape for x in tensors):
            return
        shape = ", ".join(str(sizes[dim][0]) if len(sizes.get(dim, ())) == 1 else dim for dim in dims)
        conditions = " and ".join(filter(None, (_condition(dim, sizes.get(dim)) for dim in dims)))
        found = " and ".join(shape_of(x, self.fp32) for x in tensors)
        raise ValueError(
            f"{self.name} must be {form}[{shape}]{conditions and ' with '}{conditions}, not {found}"
        )

    def _fits(self, given: object, dims: list[str], sizes: Mapping[str, range]) -> bool:
        if not isinstance(given, Tensor) or given.ndim != len(dims):
            return False
        known = [(size, sizes[dim]) for size, dim in zip(given.shape, dims, strict=True) if dim in sizes]
        return all(size in valid for size, valid in known) and (not self.fp32 or given.dtype == torch.float32)


Q_WINDOW = Input("q_window", "Hq rows d", "the queries of the last window tokens")
VALUES = Input("values", "Hkv n d_v", "the cached values")
W_O = Input("w_o", "Hq d_v hidden", "the output projection of each query head", of_model=PROJECTIONS)
ROTARY = Input(
    "rotary", "positions r/2", "the model's rotary embedding", parts=("cos", "sin"), of_model=ROTARY_EMBEDDING
)
Q_ALL = Input("q_all", "Hq n d", "the queries of all tokens")
COL_SUMS = Input("col_sums", "Hq n", "what tokens receive of the attention of all queries", instead=Q_ALL)
TILE_SUMS = Input("tile_sums", "Hq n", "what tokens receive of the attention in their tile", instead=Q_ALL)
QUERY_MOMENTS = Input("query_moments", "Hq d+1 d+1", "moments of the queries before RoPE", instead=Q_ALL)
REPEATED = Input("repeated", "Hkv n", "what each token received when the prompt was repeated", fp32=True)
WINDOW_MEAN, WINDOW_MAX, WINDOW_RECENT = (
    Input(f"window_{how}", "Hq m", "what each token receives of the window's attention", fp32=True)
    for how in ("mean", "max", "recent")
)
RECEIVED = {"mean": WINDOW_MEAN, "max": WINDOW_MAX, "recent": WINDOW_RECENT}
"""By how the window's rows are combined; each stands in for q_window and keys."""


BY_NAME = {value.name: value for value in list(globals().values()) if isinstance(value, Input)}


def inputs_of(needs: Iterable[Input | str]) -> tuple[Input, ...]:
    """Inputs, of which some may be given by their names. Raises ValueError where there is none of a name."""
    names = [what for what in needs if isinstance(what, str)]
    if unknown := set(names) - BY_NAME.keys():
        raise ValueError(f"there is no input {min(unknown)!r} (choose from {', '.join(BY_NAME)})")
    return tuple(BY_NAME[what] if isinstance(what, str) else what for what in needs)


def shape_of(given: object, dtype: bool = False) -> str:
    """A tensor's shape, behind its dtype if asked, for messages."""
    return f"{f'{given.dtype} ' * dtype}{list(given.shape)}" if isinstance(given, Tensor) else repr(given)


def _condition(dim: str, sizes: range | None) -> str | None:
    """What a dimension without a fixed size must be, for messages."""
    if sizes is None or len(sizes) == 1:
        return None
    if dim == "Hq":
        return f"Hq a multiple of Hkv={sizes.step}"
    return f"r <= {2 * (sizes.stop - 1)}" if dim == "r/2" else f"at least {sizes.start} {dim}"
