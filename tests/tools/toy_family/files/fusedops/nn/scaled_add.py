"""The ScaledAdd module: scaled_add without parameters."""

import torch
from torch import Tensor

from fusedops.functional import scaled_add

__all__ = ["ScaledAdd"]


class ScaledAdd(torch.nn.Module):
    """`x + scale * residual`. See `fusedops.functional.scaled_add`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return scaled_add(x, residual, self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
