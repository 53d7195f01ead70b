"""linear_log_probs in plain PyTorch; the C++ version is in csrc/ops/cross_entropy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.uncompiled.checks import describe
from fusedops.uncompiled.cross_entropy.arguments import (
    check_classes,
    check_linear,
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
    "linear_log_probs(Tensor input, Tensor linear_weight, Tensor target, *,"
    " Tensor? linear_bias=None, int ignore_index=-100, float? softcap=None, float? scale=None,"
    " float temperature=1.0, bool return_entropy=False, bool return_top1=False,"
    " ScalarType? dtype=None) -> (Tensor log_probs, Tensor entropy, Tensor top1)",
    "linear_log_probs_forward(Tensor input, Tensor linear_weight, Tensor target,"
    " Tensor? linear_bias, int ignore_index, float[] scalars, ScalarType dtype, bool[2] wanted)"
    " -> (Tensor log_probs, Tensor entropy, Tensor top1, Tensor lse, Tensor mean)",
    "linear_log_probs_backward(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor input,"
    " Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor lse, Tensor? mean,"
    " int ignore_index, float[] scalars, bool[3] output_mask)"
    " -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
)


def linear_log_probs(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    ignore_index=-100,
    softcap=None,
    scale=None,
    temperature=1.0,
    return_entropy=False,
    return_top1=False,
    dtype=None,
):
    _check_log_probs(input, linear_weight, target, linear_bias, softcap, temperature, dtype)
    rows = input.reshape(-1, input.shape[-1])
    curve = Curve(softcap, scale, temperature)
    options = ignore_index, curve, dtype or input.dtype, [return_entropy, return_top1]
    if not has_kernel("linear_log_probs_forward", rows, linear_weight, linear_bias):
        check_classes("linear_log_probs", target, linear_weight.shape[0], ignore_index)
        return _formula(input, linear_weight, linear_bias, target, *options)
    targets = target.reshape(-1)
    if needs_gradient(rows, linear_weight, linear_bias):
        found = _LinearLogProbs.apply(rows, linear_weight, linear_bias, targets, *options)
    else:
        found = _kernel(rows, linear_weight, linear_bias, targets, *options)
    return tuple(None if t is None else t.view(target.shape) for t in found[:3])


class Curve(NamedTuple):
    """How a logit becomes z."""

    softcap: float | None
    scale: float | None
    temperature: float

    def scalars(self) -> list[float]:
        """As the kernels' operators take it."""
        scale = 1.0 if self.scale is None else self.scale
        return [scale / self.temperature, (self.softcap or 0.0) / self.temperature]


def _kernel(input, linear_weight, linear_bias, target, ignore_index, curve, dtype, wanted):
    run = torch.ops.fusedops.linear_log_probs_forward
    options = ignore_index, curve.scalars(), dtype, wanted
    return run(input, linear_weight, target, linear_bias, *options)


def _formula(input, linear_weight, linear_bias, target, ignore_index, curve, dtype, wanted):
    run = reference("cross_entropy", "linear_log_probs_reference")
    tensors = input, linear_weight, target, linear_bias
    scalars = ignore_index, curve.softcap, curve.scale
    return run(*tensors, *scalars, *wanted, dtype, temperature=curve.temperature)


class _LinearLogProbs(torch.autograd.Function):
    """Stores no logits: the backward recomputes them."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, *options):
        tensors = input, linear_weight, linear_bias, target
        log_probs, entropy, top1, *sums = _kernel(*tensors, *options)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *sums)
        if top1 is not None:
            ctx.mark_non_differentiable(top1)
        return log_probs, entropy, top1

    @staticmethod
    def backward(ctx, *grads):
        input, linear_weight, linear_bias, target, lse, mean = ctx.saved_tensors
        ignore_index, curve, _, wanted = ctx.options
        rest = (None,) * 5
        if all(g is None for g in grads[:2]):
            return (None,) * 8
        if torch.is_grad_enabled():  # a double backward
            outputs = 2 if wanted[0] else 1

            def formula(x, weight, bias):
                return _formula(x, weight, bias, target, *ctx.options)[:outputs]

            tensors = input, linear_weight, linear_bias
            return *with_graph(formula, tensors, grads[:outputs]), *rest
        run = torch.ops.fusedops.linear_log_probs_backward
        saved = input, linear_weight, target, linear_bias, lse, mean
        options = ignore_index, curve.scalars(), list(ctx.needs_input_grad[:3])
        return *run(*grads[:2], *saved, *options), *rest


def _check_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    softcap: float | None,
    temperature: float,
    dtype: torch.dtype | None,
) -> None:
    op = "linear_log_probs"
    for name, value in (("temperature", temperature), ("softcap", softcap)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{op}: {name} must be above 0 and finite, got {value:g}")
    if linear_weight.dim() != 2:
        raise RuntimeError(
            f"{op}: linear_weight must be [classes, features], got {describe(linear_weight)}"
        )
    if target.dtype != torch.int64:
        raise RuntimeError(f"{op}: target must be int64, got {describe(target)}")
    check_linear(input, linear_weight, target, linear_bias, None, dtype, op)


def _log_probs_outputs(
    input, linear_weight, target, linear_bias, ignore_index, scalars, dtype, wanted
):
    if input.dim() != 2:
        raise RuntimeError(f"linear_log_probs_forward: input must be rows, got {describe(input)}")
    _check_log_probs(input, linear_weight, target, linear_bias, None, 1.0, dtype)

    def rows(dtype: torch.dtype, asked: bool = True) -> Tensor | None:
        return target.new_empty(target.shape, dtype=dtype) if asked else None

    entropy, top1 = wanted
    sums = rows(torch.float64), rows(torch.float64, entropy)
    return rows(dtype), rows(dtype, entropy), rows(torch.bool, top1), *sums


def _log_probs_backward_outputs(
    grad_log_probs, grad_entropy, input, linear_weight, target, linear_bias, lse, mean,
    ignore_index, scalars, output_mask,
):  # fmt: skip
    _check_log_probs(input, linear_weight, target, linear_bias, None, 1.0, None)
    return tuple(empty_gradients((input, linear_weight, linear_bias), output_mask))


implement("linear_log_probs", linear_log_probs)
implement_autocast("linear_log_probs", linear_autocast("linear_log_probs"), "cpu", "cuda")
implement_kernel("linear_log_probs_forward", _log_probs_outputs)
implement_kernel("linear_log_probs_backward", _log_probs_backward_outputs)
