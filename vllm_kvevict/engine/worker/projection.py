"""Output projections of a vLLM model, for policies that ask what a value contributes to the residual stream."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

Module = TypeVar("Module", bound=nn.Module)


class OutputProjections:
    """The projection behind each attention layer of this rank.

    Args:
        model: the rank's model.
        attentions: vLLM's attention layers in order, each held by a module that also holds its projection.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[nn.Module]):
        self.attentions = attentions
        self._found = _projections(model, attentions)

    @property
    def available(self) -> bool:
        """Whether every layer has one, unquantized."""
        return all(layer is not None for layer in self._found)

    def of(self, layer: int) -> Tensor:
        """w_o of a layer's query heads, [Hq, d, hidden]: a view, or a copy of packed weights that only the caller has.

        Read anew each time: no memory stays that requests made us take, and weights may be updated while serving.
        Unpacking is a product with a unit matrix, as much work as some hundred tokens of the prompt are in the layer
        (fp32 on two cores: 20 ms for 512 x 512, 3 s for 4096 x 4096).
        """
        linear, attention = self._found[layer], self.attentions[layer]
        assert linear is not None
        weight, inputs = linear.weight, linear.input_size_per_partition
        if weight.ndim == 2 and weight.shape[1] == inputs:
            rows = weight.detach().t()
        else:
            # Where vLLM has packed the weights, what they do to unit vectors is the weights, exactly.
            unit = torch.eye(inputs, dtype=linear.params_dtype, device=weight.device)
            rows = linear.quant_method.apply(linear, unit)
        return rows.unflatten(0, (attention.num_heads, attention.head_size))


def _projections(model: nn.Module, attentions: Sequence[nn.Module]) -> list[RowParallelLinear | None]:
    """The only unquantized row-parallel layer beside each attention layer, None where there is no such one."""
    found: list[RowParallelLinear | None] = []
    for layers in beside(model, attentions, RowParallelLinear):
        candidates = [x for x in layers if isinstance(x.quant_method, UnquantizedLinearMethod)]
        found.append(candidates[0] if len(candidates) == 1 else None)
    return found


def beside(model: nn.Module, attentions: Sequence[nn.Module], kind: type[Module]) -> list[list[Module]]:
    """The modules of a kind that the holder of each attention layer holds, too."""
    return [
        [] if holder is None else [x for x in holder.children() if isinstance(x, kind)]
        for holder in holders(model, attentions)
    ]


def holders(model: nn.Module, attentions: Sequence[nn.Module]) -> list[nn.Module | None]:
    """The module that holds each attention layer, None where there is none."""
    found = {id(child): parent for parent in model.modules() for child in parent.children()}
    return [found.get(id(attention)) for attention in attentions]
