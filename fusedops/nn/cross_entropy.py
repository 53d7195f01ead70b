"""Fused versions of torch.nn's CrossEntropyLoss and LinearCrossEntropyLoss."""

import math

import torch
from torch import Tensor

from fusedops.functional import cross_entropy, linear_cross_entropy

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss"]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss in one pass over the logits. Same arguments and state dict.

    For the extra arguments, shapes, dtypes, errors and papers, see
    `fusedops.functional.cross_entropy`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average=None,
        ignore_index: int = -100,
        reduce=None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float | None = None,
        grad_in_forward: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.scale = z_loss, softcap, scale
        self.grad_in_forward, self.dtype = grad_in_forward, dtype

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            scale=self.scale,
            grad_in_forward=self.grad_in_forward,
            dtype=self.dtype,
        )


class LinearCrossEntropyLoss(torch.nn.modules.loss._WeightedLoss):
    """torch.nn.LinearCrossEntropyLoss: a linear layer and the cross entropy of its output.

    The logits exist only one tile at a time. Arguments, parameters (`linear.weight`, `linear.bias`)
    and state dict are those of torch's module, which exists since torch 2.13. Its `options` choose
    the chunks; here they have no effect. For the extra arguments, shapes, dtypes and papers, see
    `fusedops.functional.linear_cross_entropy`. Raises RuntimeError if weight or label_smoothing
    does not fit, and in forward what the function raises.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device=None,
        dtype=None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: object = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float | None = None,
        loss_dtype: torch.dtype | None = None,
    ) -> None:
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"LinearCrossEntropyLoss: weight must be [{num_classes}], one per class, got "
                f"{list(weight.shape)}"
            )
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(
                "LinearCrossEntropyLoss: label_smoothing must be from 0 to 1, got "
                f"{label_smoothing}"
            )
        super().__init__(weight, reduction=reduction)
        self.num_classes, self.out_features = num_classes, out_features
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.z_loss, self.softcap, self.scale = z_loss, softcap, scale
        self.loss_dtype = loss_dtype
        outputs = math.prod(out_features, start=num_classes)
        self.linear = torch.nn.Linear(in_features, outputs, bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: [in_features] or [..., in_features]. Returns the loss."""
        linear_weight: Tensor = self.linear.weight
        linear_bias: Tensor | None = self.linear.bias
        if self.out_features:
            classes = self.num_classes, *self.out_features
            linear_weight = linear_weight.view(*classes, -1)
            linear_bias = None if linear_bias is None else linear_bias.view(classes)
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            scale=self.scale,
            dtype=self.loss_dtype,
        )

    def extra_repr(self) -> str:
        names = "num_classes", "out_features", "reduction", "ignore_index", "label_smoothing"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
