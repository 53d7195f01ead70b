"""A fused torch.nn.Linear with an optional activation."""

from collections.abc import Collection

import torch
from torch import Tensor

from fusedops.functional.linear import linear
from fusedops.references.linear import ACTIVATIONS

__all__ = ["Linear"]


def check_activation(module: str, activation: object, allowed: Collection[str | None]) -> None:
    """Raises ValueError for an unknown activation. module: the class, for the message."""
    if activation not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{module}: activation must be one of {names}, got {activation!r}")


class Linear(torch.nn.Linear):
    """torch.nn.Linear with a fused activation. Same arguments, parameters and state dict.

    input: [..., in_features]; the output is [..., out_features] in input's dtype. activation,
    dtypes and papers: see `fusedops.functional.linear`. Raises ValueError for an unknown
    activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        check_activation("Linear", activation, ACTIVATIONS)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.activation is None else f"{text}, activation={self.activation!r}"
