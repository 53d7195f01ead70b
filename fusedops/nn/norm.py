"""Fused LayerNorm and RMSNorm modules, and variants that add a residual before the norm."""

from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]


def _extra_repr(text: str, module: torch.nn.Module, defaults: dict[str, object]) -> str:
    """Appends to text the arguments that torch lacks and that differ from their defaults."""
    values = {name: getattr(module, name) for name in defaults}
    changed = [f"{name}={values[name]!r}" for name in defaults if values[name] != defaults[name]]
    return ", ".join([text, *changed])


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm in one pass over memory. Same arguments, parameters and state dict.

    For shapes, dtypes, errors and the paper, see `fusedops.functional.layer_norm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm in one pass over memory. Same arguments, parameters and state dict.

    For rounding, offset, shapes, dtypes, errors and the paper, see `fusedops.functional.rms_norm`.
    The weight starts at 1 - offset.
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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets offset + weight to 1."""
        if self.elementwise_affine:  # torch's constructor calls this before offset is set
            torch.nn.init.constant_(self.weight, 1 - getattr(self, "offset", 0.0))

    def extra_repr(self) -> str:
        names = {"rounding": "torch", "offset": 0.0}
        return _extra_repr(super().extra_repr(), self, names)

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.eps,
            rounding=self.rounding,
            offset=self.offset,
        )


class _AddNorm(torch.nn.Module):
    """A norm of `h = residual + dropout(x)`; forward returns (y, h)."""

    normalized_shape: tuple[int, ...]
    _fused: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

    def __init__(self, *args, dropout_p: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        p = self.dropout_p if self.training else 0.0
        if self.weight is not None:
            return self._fused(x, residual, p)
        # The operator normalizes the weight's dimensions; without a weight, only the last one.
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise RuntimeError(
                f"{type(self).__name__}: x must end in normalized_shape "
                f"{list(self.normalized_shape)}, got {list(x.shape)}"
            )
        y, h = self._fused(x.flatten(-dims), residual.flatten(-dims), p)
        return y.view(x.shape), h.view(x.shape)

    def extra_repr(self) -> str:
        return _extra_repr(super().extra_repr(), self, {"dropout_p": 0.0})


class AddLayerNorm(_AddNorm, torch.nn.LayerNorm):  # type: ignore[misc]  # two inputs, two outputs
    """torch.nn.LayerNorm of `h = residual + dropout(x)`; returns (y, h).

    x, residual, y, h: [..., *normalized_shape]. Same parameters and state dict as
    torch.nn.LayerNorm. dropout_p: the probability that an element of x is dropped, in training
    mode only. For dtypes, errors and the paper, see `fusedops.functional.add_layer_norm`.
    """

    def _fused(self, x, residual, dropout_p):
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, dropout_p=dropout_p)


class AddRMSNorm(_AddNorm, RMSNorm):  # type: ignore[misc]
    """torch.nn.RMSNorm of `h = residual + dropout(x)`; returns (y, h).

    x, residual, y, h: [..., *normalized_shape]. Same parameters and state dict as torch.nn.RMSNorm.
    dropout_p: the probability that an element of x is dropped, in training mode only. rounding,
    offset: see `RMSNorm`. For dtypes, errors and the paper, see `fusedops.functional.add_rms_norm`.
    """

    def _fused(self, x, residual, dropout_p):
        options = {"rounding": self.rounding, "offset": self.offset, "dropout_p": dropout_p}
        return add_rms_norm(x, residual, self.weight, self.eps, **options)
