"""Where a mask is true."""

import numpy as np
import torch
from torch import Tensor


def true_places(mask: Tensor, count: int) -> Tensor:
    """Flat places of a mask's true elements, ascending.

    Args:
        mask: bool, of any shape.
        count: how many there are; nobody waits for a device to learn that.

    Returns:
        int64 [count].
    """
    if mask.device.type == "cpu":
        # On one thread torch takes 13 times as long.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero_static(mask.flatten(), size=count).flatten()
