"""SwiGLU and GEGLU modules, which have no parameters."""

import torch
from torch import Tensor

from fusedops.functional import geglu, swiglu

__all__ = ["GEGLU", "SwiGLU"]


class SwiGLU(torch.nn.Module):
    """`silu(gate) * up`, for two tensors or for the two halves of one.

    For arguments, shapes, dtypes, errors and the paper, see `fusedops.functional.swiglu`.
    """

    def __init__(
        self, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.limit, self.alpha, self.up_offset = limit, alpha, up_offset

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, limit=self.limit, alpha=self.alpha, up_offset=self.up_offset)

    def extra_repr(self) -> str:
        return f"limit={self.limit}, alpha={self.alpha}, up_offset={self.up_offset}"


class GEGLU(torch.nn.Module):
    """`gelu(gate) * up`, for two tensors or for the two halves of one.

    For arguments, shapes, dtypes, errors and the paper, see `fusedops.functional.geglu`.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
