"""The ScaledCopy module, which multiplies its input by a fixed number."""

import torch
from torch import Tensor

from fusedops.functional import scaled_copy

__all__ = ["ScaledCopy"]


class ScaledCopy(torch.nn.Module):
    """`scale * x`. See `fusedops.functional.scaled_copy`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return scaled_copy(x, self.scale)
