"""The cross-entropy losses in plain PyTorch; the C++ version is in csrc/ops/cross_entropy."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.uncompiled.checks import describe, widened
from fusedops.uncompiled.cross_entropy.arguments import (
    check,
    check_classes,
    check_linear,
    empty,
    empty_gradients,
    linear_autocast,
)
from fusedops.uncompiled.library import (
    define,
    has_kernel,
    implement,
    implement_autocast,
    implement_kernel,
    needs_gradient,
    reference,
    with_graph,
)

define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100,"
    " str reduction='mean', float label_smoothing=0.0, *, float z_loss=0.0, float? softcap=None,"
    " float? scale=None, bool grad_in_forward=False, ScalarType? dtype=None) -> Tensor",
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *,"
    " Tensor? linear_bias=None, Tensor? weight=None, int ignore_index=-100, str reduction='mean',"
    " float label_smoothing=0.0, float z_loss=0.0, float? softcap=None, float? scale=None,"
    " ScalarType? dtype=None) -> Tensor",
    "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index,"
    " int reduction, float[] scalars, ScalarType dtype, bool with_gradient)"
    " -> (Tensor loss, Tensor lse, Tensor total, Tensor dinput)",
    "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor lse,"
    " Tensor total, int ignore_index, int reduction, float[] scalars) -> Tensor",
    "linear_cross_entropy_forward(Tensor input, Tensor linear_weight, Tensor target,"
    " Tensor? linear_bias, Tensor? weight, int ignore_index, int reduction, float[] scalars,"
    " ScalarType dtype, bool[3] gradients) -> (Tensor loss, Tensor lse, Tensor total,"
    " Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
    "linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor linear_weight, Tensor target,"
    " Tensor? linear_bias, Tensor? weight, Tensor lse, Tensor total, int ignore_index,"
    " int reduction, float[] scalars, bool[3] output_mask)"
    " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
)

REDUCTIONS = ("none", "mean", "sum")  # in the order of torch's numbers


def cross_entropy(
    input,
    target,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    *,
    z_loss=0.0,
    softcap=None,
    scale=None,
    grad_in_forward=False,
    dtype=None,
):
    _check_options("cross_entropy", reduction, label_smoothing, softcap)
    check("cross_entropy", input, input.shape, target, weight, dtype)
    options = {"z_loss": z_loss, "softcap": softcap, "scale": scale}
    numbers = ignore_index, reduction, label_smoothing
    dtype = dtype or input.dtype
    rows = _as_rows(input) if target.dtype == torch.int64 else None
    if rows is None or not _takes(rows, weight):
        classes = input.shape[min(1, input.dim() - 1)]
        check_classes("cross_entropy", target, classes, ignore_index)
        return _formula(input, target, weight, dtype, *numbers, **options)
    scalars = [label_smoothing, z_loss, 1.0 if scale is None else scale, softcap or 0.0]
    fixed = target.reshape(-1), weight, ignore_index, REDUCTIONS.index(reduction), scalars, dtype
    if needs_gradient(rows):
        loss = _CrossEntropy.apply(rows, *fixed, grad_in_forward and _may_make(rows))
    else:
        loss = torch.ops.fusedops.cross_entropy_forward(rows, *fixed, False)[0]
    return loss.view(target.shape) if reduction == "none" else loss


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    scale=None,
    dtype=None,
):
    _check_options("linear_cross_entropy", reduction, label_smoothing, softcap)
    check_linear(input, linear_weight, target, linear_bias, weight, dtype)
    if linear_weight.dim() == 2 and target.dtype == torch.int64:
        tensors = input.reshape(-1, input.shape[-1]), linear_weight, linear_bias
        if has_kernel("linear_cross_entropy_forward", *tensors) and not needs_gradient(weight):
            scalars = [label_smoothing, z_loss, 1.0 if scale is None else scale, softcap or 0.0]
            fixed = target.reshape(-1), weight, ignore_index, REDUCTIONS.index(reduction), scalars
            loss = _linear_by_kernels(*tensors, *fixed, dtype or input.dtype)
            return loss.view(target.shape) if reduction == "none" else loss
    check_classes("linear_cross_entropy", target, linear_weight.shape[0], ignore_index)
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    options = {"z_loss": z_loss, "softcap": softcap, "scale": scale}
    tail = weight, dtype or input.dtype, ignore_index, reduction, label_smoothing
    if linear_weight.dim() > 2:
        return _formula(logits.unflatten(-1, linear_weight.shape[:-1]), target, *tail, **options)
    if input.dim() == 2:
        return _formula(logits, target, *tail, **options)
    rows = logits.unsqueeze(0) if input.dim() == 1 else logits.flatten(0, -2)
    if target.is_floating_point():
        target = target.reshape(rows.shape)
    loss = _formula(rows, target if target.is_floating_point() else target.reshape(-1), *tail,
                    **options)  # fmt: skip
    return loss.view(input.shape[:-1]) if reduction == "none" else loss


def _formula(input, target, weight, dtype, *numbers, **options):
    """Runs the reference in float32 (float64 for float64), and rounds once to dtype."""
    wide = widened(input.dtype)
    run = reference("cross_entropy", "cross_entropy_reference")
    target = target.to(wide) if target.is_floating_point() else target
    loss = run(input.to(wide), target, weight, *numbers, **options)
    return loss.to(wide if wide == torch.float64 else dtype)


# The kernels, with gradients: csrc/ops/cross_entropy/autograd.cpp and linear.cpp.


def _as_rows(input: Tensor) -> Tensor | None:
    """Logits as rows with contiguous classes; None if they are not laid out like that."""
    last = input.movedim(1, -1) if input.dim() > 2 else input
    if last.stride(-1) != 1 and last.shape[-1] != 1:
        return None
    return last.flatten(0, -2) if last.dim() > 2 else last.reshape(-1, last.shape[-1])


def _takes(rows: Tensor, weight: Tensor | None) -> bool:
    return has_kernel("cross_entropy_forward", rows, weight) and not needs_gradient(weight)


def _may_make(t: Tensor) -> bool:
    """Whether the forward may compute the gradient: in float16 it would underflow."""
    return t.dtype != torch.float16


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, target, weight, ignore_index, reduction, scalars, dtype, made):
        run = torch.ops.fusedops.cross_entropy_forward
        arguments = input, target, weight, ignore_index, reduction, scalars, dtype, made
        loss, lse, total, dinput = run(*arguments)
        ctx.made, ctx.options = made, (ignore_index, reduction, scalars, dtype)
        ctx.save_for_backward(*((dinput,) if made else (input, target, weight, lse, total)))
        return loss

    @staticmethod
    def backward(ctx, grad):
        rest = (None,) * 7
        if ctx.made and torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy: grad_in_forward=True keeps no logits, so it has no double backward"
            )
        if ctx.made:
            return _scaled(ctx.saved_tensors[0], grad), *rest
        input, target, weight, lse, total = ctx.saved_tensors
        numbers = ctx.options[:3]
        if torch.is_grad_enabled():  # a double backward
            formula = _with_options(target, weight, *ctx.options)
            return *with_graph(lambda x: (formula(x),), (input,), (grad,)), *rest
        run = torch.ops.fusedops.cross_entropy_backward
        return run(grad, input, target, weight, lse, total, *numbers), *rest


def _linear_by_kernels(
    input, linear_weight, linear_bias, target, weight, ignore_index, reduction, scalars, dtype
):
    tensors = input, linear_weight, linear_bias
    options = ignore_index, reduction, scalars, dtype
    if needs_gradient(*tensors):
        return _LinearCrossEntropy.apply(*tensors, target, weight, *options)
    run = torch.ops.fusedops.linear_cross_entropy_forward
    return run(input, linear_weight, target, linear_bias, weight, *options, [False] * 3)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """Stores no logits: the forward computes the gradients, or the backward recomputes them."""

    @staticmethod
    def forward(
        ctx,
        input,
        linear_weight,
        linear_bias,
        target,
        weight,
        ignore_index,
        reduction,
        scalars,
        dtype,
    ):
        frozen = not ctx.needs_input_grad[1]
        summed = REDUCTIONS[reduction] != "none" and _may_make(linear_weight)
        ctx.made = summed and (frozen or linear_weight.dtype == torch.float32)
        wanted = [ctx.made and needed for needed in ctx.needs_input_grad[:3]]
        run = torch.ops.fusedops.linear_cross_entropy_forward
        options = ignore_index, reduction, scalars, dtype
        loss, lse, total, *made = run(
            input, linear_weight, target, linear_bias, weight, *options, wanted
        )
        ctx.options = options
        ctx.save_for_backward(input, linear_weight, linear_bias, target, weight, lse, total, *made)
        return loss

    @staticmethod
    def backward(ctx, grad):
        input, linear_weight, linear_bias, target, weight, lse, total, *made = ctx.saved_tensors
        ignore_index, reduction, scalars, _ = ctx.options
        rest = (None,) * 6
        if torch.is_grad_enabled():  # a double backward
            formula = _with_options(target, weight, *ctx.options)
            tensors = input, linear_weight, linear_bias
            return *with_graph(lambda *t: (formula(F.linear(*t)),), tensors, (grad,)), *rest
        if ctx.made:
            return *(_scaled(t, grad) for t in made), *rest
        run = torch.ops.fusedops.linear_cross_entropy_backward
        numbers = ignore_index, reduction, scalars, list(ctx.needs_input_grad[:3])
        saved = input, linear_weight, target, linear_bias, weight, lse, total
        return *run(grad, *saved, *numbers), *rest


def _with_options(target, weight, ignore_index, reduction, scalars, dtype):
    """The reference's loss for logits [rows, classes]."""
    label_smoothing, z_loss, scale, softcap = scalars
    options = {"z_loss": z_loss, "scale": scale, "softcap": softcap or None}
    numbers = ignore_index, REDUCTIONS[reduction], label_smoothing
    return lambda logits: _formula(logits, target, weight, dtype, *numbers, **options)


def _scaled(made: Tensor | None, grad: Tensor) -> Tensor | None:
    """A gradient computed by the forward, times the loss's gradient."""
    if made is None:
        return None
    return (made * (grad.unsqueeze(-1) if grad.dim() else grad)).to(made.dtype)


def _check_options(op: str, reduction: str, label_smoothing: float, softcap: float | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got '{reduction}'")
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"{op}: label_smoothing must be from 0 to 1, got {label_smoothing:g}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"{op}: softcap must be above 0 and finite, got {softcap:g}")


def _autocast(cast, input, *args, dtype=None, **kwargs):
    dtype = dtype or widened(input.dtype)
    return torch.ops.fusedops.cross_entropy(input, *args, dtype=dtype, **kwargs)


# The outputs that kernels fill: csrc/ops/cross_entropy/outputs.cpp.


def _outputs(input, target, weight, ignore_index, reduction, scalars, dtype, with_gradient):
    if input.dim() != 2:
        raise RuntimeError(f"cross_entropy_forward: input must be rows, got {describe(input)}")
    check("cross_entropy", input, input.shape, target, weight, dtype)
    dinput = empty(input) if with_gradient else None
    return *_row_outputs(target, reduction, dtype), dinput


def _backward_outputs(grad, input, target, weight, lse, total, ignore_index, reduction, scalars):
    check("cross_entropy", input, input.shape, target, weight, None)
    return empty(input)


def _linear_outputs(
    input, linear_weight, target, linear_bias, weight, ignore_index, reduction, scalars, dtype,
    gradients,
):  # fmt: skip
    check_linear(input, linear_weight, target, linear_bias, weight, dtype)
    made = empty_gradients((input, linear_weight, linear_bias), gradients)
    return *_row_outputs(target, reduction, dtype), *made


def _linear_backward_outputs(
    grad, input, linear_weight, target, linear_bias, weight, lse, total, ignore_index, reduction,
    scalars, output_mask,
):  # fmt: skip
    check_linear(input, linear_weight, target, linear_bias, weight, None)
    return tuple(empty_gradients((input, linear_weight, linear_bias), output_mask))


def _row_outputs(target: Tensor, reduction: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Allocates loss, lse and total."""
    shape = target.shape if REDUCTIONS[reduction] == "none" else ()
    wide = torch.float64
    return (
        target.new_empty(shape, dtype=dtype),
        target.new_empty(target.shape, dtype=wide),
        target.new_empty((), dtype=wide),
    )


implement("cross_entropy", cross_entropy)
implement("linear_cross_entropy", linear_cross_entropy)
implement_autocast("cross_entropy", _autocast, "cpu", "cuda")
implement_autocast("linear_cross_entropy", linear_autocast("linear_cross_entropy"), "cpu", "cuda")
implement_kernel("cross_entropy_forward", _outputs)
implement_kernel("cross_entropy_backward", _backward_outputs)
implement_kernel("linear_cross_entropy_forward", _linear_outputs)
implement_kernel("linear_cross_entropy_backward", _linear_backward_outputs)
