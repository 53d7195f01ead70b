"""Checks and casts the arguments of the cross-entropy operators, and allocates gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedops.uncompiled.checks import (
    check_floating,
    check_same_device,
    describe,
    dtype_name,
    has_numbers,
    widened,
)


def check(
    op: str,
    input: Tensor,
    logits: Sequence[int],
    target: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype | None,
) -> None:
    """Checks the arguments. logits: the logits' shape, [C], [N, C] or [N, C, ...]."""
    check_floating(op, "input", input)
    shape = list(logits)
    if not shape:
        raise RuntimeError(f"{op}: input must have a dimension of classes, got {describe(input)}")
    axis = min(1, len(shape) - 1)
    check_target(op, shape, axis, target)
    check_same_device(op, "target", target, "input", input)
    if weight is not None:
        check_floating(op, "weight", weight)
        check_same_device(op, "weight", weight, "input", input)
        if list(weight.shape) != [shape[axis]]:
            raise RuntimeError(
                f"{op}: weight must be [{shape[axis]}], one number a class, got {describe(weight)}"
            )
    if dtype not in (None, input.dtype, torch.float32):
        raise RuntimeError(
            f"{op}: dtype must be float32 or input's, {dtype_name(input.dtype)}, got "
            f"{dtype_name(dtype)}"
        )


def check_target(op: str, logits: list[int], axis: int, target: Tensor) -> None:
    if target.is_floating_point():
        if list(target.shape) != logits:
            raise RuntimeError(
                f"{op}: target must be probabilities {logits} like the logits, or int64 class "
                f"indices, got {describe(target)}"
            )
        return
    shape = logits[:axis] + logits[axis + 1 :]
    if target.dtype not in (torch.int64, torch.uint8) or list(target.shape) != shape:
        raise RuntimeError(
            f"{op}: target must be int64 {shape} like the logits {logits}, got {describe(target)}"
        )


def check_classes(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    if target.is_floating_point() or not has_numbers(target):
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        row = int(wrong.flatten().nonzero()[0])
        raise IndexError(
            f"{op}: target must be a class from 0 to {classes - 1} or ignore_index {ignore_index}, "
            f"got {target.flatten()[row].item()} in row {row}"
        )


def check_linear(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype | None,
    op: str = "linear_cross_entropy",
) -> None:
    check_floating(op, "input", input)
    check_floating(op, "linear_weight", linear_weight)
    check_same_device(op, "linear_weight", linear_weight, "input", input)
    if linear_weight.dim() < 2:
        raise RuntimeError(
            f"{op}: linear_weight must be [classes, features] or [classes, ..., features], got "
            f"{describe(linear_weight)}"
        )
    fits = input.dim() and input.shape[-1] == linear_weight.shape[-1]
    if not fits or input.dtype != linear_weight.dtype:
        raise RuntimeError(
            f"{op}: linear_weight must have input's dtype and last dimension, {describe(input)}, "
            f"got {describe(linear_weight)}"
        )
    classes, rows = list(linear_weight.shape[:-1]), list(input.shape[:-1])
    if len(classes) > 1 and input.dim() != 2:
        raise RuntimeError(
            f"{op}: input must be [N, features] for linear_weight {describe(linear_weight)}, "
            f"got {describe(input)}"
        )
    if linear_bias is not None:
        check_same_device(op, "linear_bias", linear_bias, "input", input)
        if linear_bias.dtype != input.dtype or list(linear_bias.shape) != classes:
            raise RuntimeError(
                f"{op}: linear_bias must be {dtype_name(input.dtype)} {classes} like input and "
                f"linear_weight's classes, got {describe(linear_bias)}"
            )
    if len(classes) > 1 or target.is_floating_point():
        return check(op, input, rows + classes, target, weight, dtype)
    if list(target.shape) != rows:
        raise RuntimeError(
            f"{op}: target must be int64 {rows} like the rows of input, {describe(input)}, got "
            f"{describe(target)}"
        )
    return check(op, input, [target.numel(), *classes], target.reshape(-1), weight, dtype)


def linear_autocast(op: str) -> Callable:
    def run(cast, input, linear_weight, target, *, linear_bias=None, dtype=None, **kwargs):
        x = cast(input)
        kwargs |= {"linear_bias": cast(linear_bias), "dtype": dtype or widened(x.dtype)}
        return getattr(torch.ops.fusedops, op)(x, cast(linear_weight), target, **kwargs)

    return run


def empty_gradients(tensors: Sequence[Tensor | None], mask: Sequence[bool]) -> list[Tensor | None]:
    pairs = zip(tensors, mask, strict=True)
    return [empty(t) if wanted and t is not None else None for t, wanted in pairs]


def empty(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)
