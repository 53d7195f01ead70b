"""LayerNorm and RMSNorm as torch.nn has them, and both of a residual sum."""

import functools

import torch
from torch import Tensor

from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm in one pass over memory. Same arguments, parameters and state dict."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm in one pass over memory. Same arguments, parameters and state dict.

    rounding, offset: see `fusedops.functional.rms_norm`.
    """

    def __init__(
        self,
        normalized_shape,
        eps=None,
        elementwise_affine=True,
        device=None,
        dtype=None,
        *,
        rounding: str = "torch",
        offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.rounding, self.offset = rounding, offset

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.eps,
            rounding=self.rounding,
            offset=self.offset,
        )


class AddLayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm of `h = residual + dropout(x)`; returns (y, h).

    x, residual: [..., *normalized_shape]. Same parameters and state dict as torch.nn.LayerNorm.
    dropout_p drops elements of x in training mode.
    """

    def __init__(self, *args, dropout_p: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p

    def forward(  # type: ignore[override]  # it takes and returns two
        self, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = self.dropout_p if self.training else 0.0
        if self.weight is None:
            run = functools.partial(add_layer_norm, eps=self.eps, dropout_p=p)
            return _over_last(len(self.normalized_shape), run, x, residual)
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, dropout_p=p)


class AddRMSNorm(RMSNorm):
    """torch.nn.RMSNorm of `h = residual + dropout(x)`; returns (y, h).

    x, residual: [..., *normalized_shape]. Same parameters and state dict as torch.nn.RMSNorm.
    dropout_p drops elements of x in training mode; rounding, offset: see `RMSNorm`.
    """

    def __init__(self, *args, dropout_p: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p

    def forward(  # type: ignore[override]  # it takes and returns two
        self, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        p = self.dropout_p if self.training else 0.0
        run = functools.partial(
            add_rms_norm, eps=self.eps, rounding=self.rounding, offset=self.offset, dropout_p=p
        )
        if self.weight is None:
            return _over_last(len(self.normalized_shape), run, x, residual)
        return run(x, residual, self.weight)


def _over_last(dims, run, x, residual):
    """Without a weight the operator normalises the last dimension: makes one of `dims`."""
    y, h = run(x.flatten(-dims), residual.flatten(-dims))
    return y.view(x.shape), h.view(x.shape)
