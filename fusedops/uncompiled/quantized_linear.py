"""Quantized matmuls and weights in plain PyTorch; in C++, see csrc/ops/quantized_linear."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.uncompiled.checks import (
    FLOATS,
    check_activation,
    check_floating,
    check_like,
    check_same_device,
    check_shape,
    describe,
    dtype_name,
    wants_gradient,
    widened,
)
from fusedops.uncompiled.library import (
    define,
    export,
    has_kernel,
    implement,
    implement_autocast,
    implement_kernel,
    needs_gradient,
    reference,
    with_graph,
)
from fusedops.uncompiled.linear import ACTIVATE

OP = "quantized_linear"
NF4_BLOCK = 64
CODES = {"int8": torch.int8, "int4": torch.uint8, "nf4": torch.uint8, "fp8": torch.float8_e4m3fn}

_WEIGHT = "Tensor qweight, Tensor scales, Tensor? zeros, "
_LAYOUT = "str format, SymInt out_features, SymInt in_features, int group_size, "
_HOW = (
    "str activation, str input_format, str compute, bool keep_z, Tensor? x_scale=None,"
    " ScalarType? out_dtype=None) -> (Tensor y, Tensor z)"
)
define(
    f"quantized_linear(Tensor x, {_WEIGHT}Tensor? bias, {_LAYOUT}str? activation=None,"
    " str? input_format=None, str? compute=None, Tensor? x_scale=None,"
    " ScalarType? out_dtype=None) -> Tensor",
    f"quantized_linear_forward(Tensor x, {_WEIGHT}Tensor? bias, {_LAYOUT}{_HOW}",
    f"quantized_linear_tiles(Tensor x, {_WEIGHT}Tensor? bias, {_LAYOUT}{_HOW}",
    f"quantized_linear_backward(Tensor dy, {_WEIGHT}Tensor? z, {_LAYOUT}str activation,"
    " str compute, bool[2] output_mask) -> (Tensor dx, Tensor dbias)",
    f"dequantize_weight({_WEIGHT}{_LAYOUT}ScalarType dtype) -> Tensor",
    "quantize_groups(Tensor groups, str format, float[] shares)"
    " -> (Tensor codes, Tensor scales, Tensor zeros)",
)


def quantized_linear(
    x, qweight, scales, zeros, bias, format, out_features, in_features, group_size,
    activation=None, input_format=None, compute=None, x_scale=None, out_dtype=None,
):  # fmt: skip
    if scales.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{OP}: scales must not require a gradient: the weight has none")
    weight = qweight, scales, zeros, format, out_features, in_features, group_size
    options = activation or "none", input_format or "none", compute or "any"
    if x_scale is not None:
        _check_no_gradient_of_codes(bias, x_scale)
        return _forward(x, *weight[:3], bias, *weight[3:], *options, False, x_scale, out_dtype)[0]
    _check(x, bias, weight, *options, None, out_dtype)
    if not has_kernel("quantized_linear_forward", x, bias):
        return _formula(x, bias, weight, *options)
    if needs_gradient(x, bias):
        return _QuantizedLinear.apply(x, bias, weight, *options)
    run = torch.ops.fusedops.quantized_linear_forward
    return run(x, *weight[:3], bias, *weight[3:], *options, False)[0]


def _formula(x, bias, weight, activation, input_format, compute):
    rounded = None if input_format == "none" else input_format
    return ACTIVATE[activation](_product(x, weight, bias, rounded, compute))


class _QuantizedLinear(torch.autograd.Function):
    """The kernels with gradients of x and bias: csrc/ops/quantized_linear/autograd.cpp."""

    @staticmethod
    def forward(ctx, x, bias, weight, activation, input_format, compute):
        operands, layout = weight[:3], weight[3:]
        run = torch.ops.fusedops.quantized_linear_forward
        y, z = run(x, *operands, bias, *layout, activation, input_format, compute, True)
        ctx.save_for_backward(x, bias, *operands, z)
        ctx.layout, ctx.options = layout, (activation, input_format, compute)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, bias, *operands, z = ctx.saved_tensors
        weight = *operands, *ctx.layout
        if torch.is_grad_enabled():  # a double backward

            def formula(x, bias):
                return (_formula(x, bias, weight, *ctx.options),)

            return *with_graph(formula, (x, bias), (dy,)), *(None,) * 4
        activation, _, compute = ctx.options
        mask = list(ctx.needs_input_grad[:2])
        run = torch.ops.fusedops.quantized_linear_backward
        return *run(dy, *operands, z, *ctx.layout, activation, compute, mask), *(None,) * 4


def _product(x, weight, bias, input_format, compute):
    """x w^T + bias, rounded to x's dtype. The gradient ignores the operands' rounding."""
    operand = _operand_dtype(x.dtype, compute)
    if operand == x.dtype and input_format is None:
        return F.linear(x, _dequantized(weight, x.dtype), bias)
    rounded = reference(OP, "rounded_rows")
    a = _rounded_to(x, operand) if input_format is None else rounded(x, input_format)
    return _wide_product(a, weight, bias, operand, x.dtype)


def _product_of_codes(codes, scale, weight, bias, compute, dtype):
    wide = widened(dtype)
    a = codes.to(wide) * scale.to(wide)
    return _wide_product(a, weight, bias, _operand_dtype(dtype, compute), dtype)


def _wide_product(a, weight, bias, operand, dtype):
    """a w^T + bias in a's dtype, rounded to dtype; operand: the weight's dtype."""
    operands = reference(OP, "operands_reference")
    w, factors = operands(*weight, a.dtype)  # unscaled codes are exact in any operand's dtype
    z = F.linear(a, w if factors is not None else _rounded_to(w, operand))
    z = z if factors is None else z * factors
    return (z if bias is None else z + bias.to(a.dtype)).to(dtype)


def _operand_dtype(dtype: torch.dtype, compute: str) -> torch.dtype:
    """The dtype that operands are rounded to; sums are float32 in any case."""
    if compute == "bf16":
        return torch.bfloat16
    return dtype if compute == "any" else torch.float32


def _rounded_to(t: Tensor, dtype: torch.dtype) -> Tensor:
    wide = t.to(widened(t.dtype))
    if wide.dtype == torch.float64 or dtype == torch.float32:
        return wide
    detached = wide.detach()
    change = detached.to(dtype).float() - detached
    return wide + change.nan_to_num(0, 0, 0)  # of infinities


def _dequantized(weight: tuple, dtype: torch.dtype) -> Tensor:
    return reference(OP, "dequantize_weight_reference")(*weight, dtype)


def _autocast(
    cast, x, qweight, scales, zeros, bias, format, out_features, in_features, group_size,
    activation=None, input_format=None, compute=None, x_scale=None, out_dtype=None,
):  # fmt: skip
    run = torch.ops.fusedops.quantized_linear
    layout, options = (format, out_features, in_features, group_size), (activation, input_format)
    if x_scale is None:
        x = cast(x)
    elif out_dtype != torch.float64:
        out_dtype = cast(x_scale).dtype
    operands = qweight, scales, zeros, cast(bias)
    return run(x, *operands, *layout, *options, compute, x_scale, out_dtype)


def _check(
    x, bias, weight, activation, input_format, compute, x_scale=None, out_dtype=None
) -> None:
    check_weight(*weight)
    check_activation(OP, activation)
    _check_compute(compute)
    _check_input(weight, input_format, compute)
    if x_scale is None:
        _check_features("x", x, weight[5], weight[0])
        if out_dtype not in (None, x.dtype):
            raise RuntimeError(
                f"{OP}: out_dtype must be x's dtype or None unless x is codes, got "
                f"{dtype_name(out_dtype)}"
            )
        if bias is not None:
            check_like(OP, "bias", bias, "x", x)
    else:
        _check_codes(x, x_scale, bias, weight, input_format, out_dtype or x.dtype)
    if bias is not None:
        check_shape(OP, "bias", bias, [weight[4]])


def _check_codes(codes, scale, bias, weight, input_format, dtype) -> None:
    formats = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    if codes.dtype not in formats:
        raise RuntimeError(f"{OP}: codes must be int8 or float8_e4m3fn, got {describe(codes)}")
    if input_format != formats[codes.dtype]:
        raise ValueError(
            f"{OP}: input_format must be None or that of the codes, '{formats[codes.dtype]}', got "
            f"'{input_format}'"
        )
    check_same_device(OP, "codes", codes, "qweight", weight[0])
    if not codes.dim() or codes.shape[-1] != weight[5]:
        raise RuntimeError(f"{OP}: codes must have shape [..., {weight[5]}], got {describe(codes)}")
    check_same_device(OP, "scale", scale, "codes", codes)
    shape = [*codes.shape[:-1], 1]
    if scale.dtype != torch.float32 or list(scale.shape) != shape:
        raise RuntimeError(
            f"{OP}: scale must be float32 {shape}, a number for each row of the codes, got "
            f"{describe(scale)}"
        )
    if dtype not in FLOATS:
        raise RuntimeError(
            f"{OP}: out_dtype must be float32, float16, bfloat16 or float64, got "
            f"{dtype_name(dtype)}"
        )
    if bias is not None:
        check_same_device(OP, "bias", bias, "codes", codes)
        if bias.dtype != dtype:
            wanted = f"{dtype_name(dtype)} {list(bias.shape)}"
            raise RuntimeError(f"{OP}: bias must be {wanted} like the output, got {describe(bias)}")


def _check_no_gradient_of_codes(*tensors: Tensor | None) -> None:
    if wants_gradient(*tensors):
        raise RuntimeError(
            f"{OP}: codes have no gradient, but the scale or the bias requires one (call it under "
            "torch.no_grad())"
        )


def _check_compute(compute: str) -> None:
    if compute not in ("any", "exact", "bf16", "int8"):
        raise ValueError(f"{OP}: compute must be None, 'exact', 'bf16' or 'int8', got '{compute}'")


def check_weight(qweight, scales, zeros, format, n, k, group_size) -> None:
    _check_format(OP, format)
    if n < 0 or k < 0 or group_size < 1:
        raise RuntimeError(
            f"{OP}: out_features and in_features must not be negative and group_size not below 1, "
            f"got {n}, {k} and {group_size}"
        )
    if format == "nf4" and group_size != NF4_BLOCK:
        raise RuntimeError(f"{OP}: group_size of nf4 must be {NF4_BLOCK}, got {group_size}")
    if format == "int4" and group_size % 2:
        raise RuntimeError(
            f"{OP}: group_size of int4 must be even, as two codes of a group are a byte, got "
            f"{group_size}"
        )
    shape = {"int4": [n, (k + 1) // 2], "nf4": [(n * k + 1) // 2, 1]}.get(format, [n, k])
    _check_part("qweight", qweight, CODES[format], shape, qweight)
    groups = [n, -(-k // group_size)] if format != "nf4" else [-(-n * k // NF4_BLOCK)]
    _check_part("scales", scales, torch.float32, groups, qweight)
    if (zeros is not None) != (format == "int4"):
        raise RuntimeError(f"{OP}: int4 has zeros, and no other format")
    if zeros is not None:
        _check_part("zeros", zeros, torch.uint8, groups, qweight)


def _check_format(op: str, format: str) -> None:
    if format not in CODES:
        raise ValueError(f"{op}: format must be 'int8', 'int4', 'nf4' or 'fp8', got '{format}'")


def _check_part(
    name: str, t: Tensor, dtype: torch.dtype, shape: list[int], qweight: Tensor
) -> None:
    check_same_device(OP, name, t, "qweight", qweight)
    if t.dtype != dtype or list(t.shape) != shape:
        raise RuntimeError(f"{OP}: {name} must be {dtype_name(dtype)} {shape}, got {describe(t)}")


def _check_features(name: str, t: Tensor, n: int, qweight: Tensor) -> None:
    check_floating(OP, name, t)
    check_same_device(OP, name, t, "qweight", qweight)
    if not t.dim() or t.shape[-1] != n:
        raise RuntimeError(f"{OP}: {name} must have shape [..., {n}], got {describe(t)}")


def _check_input(weight: tuple, input_format: str, compute: str) -> None:
    if input_format not in ("none", "int8", "fp8"):
        raise ValueError(f"{OP}: input_format must be None, 'int8' or 'fp8', got '{input_format}'")
    if compute == "int8" and input_format != "int8":
        raise ValueError(f"{OP}: compute='int8' multiplies codes: it needs input_format='int8'")
    if compute == "int8" and weight[3] not in ("int8", "int4"):
        raise ValueError(f"{OP}: compute='int8' needs a weight of integers, int8 or int4")


# The outputs that kernels fill, and what runs where a device has no kernel for the arguments.


def _outputs(
    x, qweight, scales, zeros, bias, format, out_features, in_features, group_size, activation,
    input_format, compute, keep_z, x_scale=None, out_dtype=None,
):  # fmt: skip
    weight = qweight, scales, zeros, format, out_features, in_features, group_size
    _check(x, bias, weight, activation, input_format, compute, x_scale, out_dtype)
    y = x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)
    return y, torch.empty_like(y) if keep_z and activation != "none" else None


def _backward_outputs(
    dy, qweight, scales, zeros, z, format, out_features, in_features, group_size, activation,
    compute, output_mask,
):  # fmt: skip
    check_weight(qweight, scales, zeros, format, out_features, in_features, group_size)
    check_activation(OP, activation)
    _check_compute(compute)
    _check_features("dy", dy, out_features, qweight)
    if activation != "none" and z is None:
        raise RuntimeError(f"{OP}: the gradient of an activation needs z")
    if z is not None:
        check_like(OP, "z", z, "dy", dy)
        check_shape(OP, "z", z, dy.shape)
    dx = dy.new_empty((*dy.shape[:-1], in_features)) if output_mask[0] else None
    return dx, dy.new_empty((out_features,)) if output_mask[1] else None


def _forward(
    x, qweight, scales, zeros, bias, format, out_features, in_features, group_size, activation,
    input_format, compute, keep_z, x_scale=None, out_dtype=None,
):  # fmt: skip
    weight = qweight, scales, zeros, format, out_features, in_features, group_size
    _check(x, bias, weight, activation, input_format, compute, x_scale, out_dtype)
    if x_scale is not None:
        z = _product_of_codes(x, x_scale, weight, bias, compute, out_dtype or x.dtype)
    else:
        z = _product(x, weight, bias, None if input_format == "none" else input_format, compute)
    return ACTIVATE[activation](z), z if keep_z and activation != "none" else None


def _backward(
    dy, qweight, scales, zeros, z, format, out_features, in_features, group_size, activation,
    compute, output_mask,
):  # fmt: skip
    weight = qweight, scales, zeros, format, out_features, in_features, group_size
    dz = dy
    if activation != "none":
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (dz,) = torch.autograd.grad(ACTIVATE[activation](leaf), leaf, dy)
    wide = widened(dy.dtype)
    operand = _operand_dtype(dy.dtype, "any" if compute == "int8" else compute)
    dx = dbias = None
    if output_mask[0]:
        w = _rounded_to(_dequantized(weight, wide), operand)
        dx = (_rounded_to(dz, operand) @ w).to(dy.dtype)
    if output_mask[1]:
        dbias = dz.reshape(-1, out_features).sum(0)
    return dx, dbias


def _dequantize_outputs(
    qweight, scales, zeros, format, out_features, in_features, group_size, dtype
):
    check_weight(qweight, scales, zeros, format, out_features, in_features, group_size)
    if not dtype.is_floating_point:
        raise RuntimeError(
            f"dequantize_weight: dtype must be a floating one, got {dtype_name(dtype)}"
        )
    return qweight.new_empty((out_features, in_features), dtype=dtype)


def _dequantize(*arguments):
    _dequantize_outputs(*arguments)
    return _dequantized(arguments[:-1], arguments[-1])


def _groups_outputs(groups, format, shares):
    op = "quantize_groups"
    _check_format(op, format)
    four_bits = format in ("int4", "nf4")
    if groups.dtype != torch.float32 or groups.dim() != 2:
        raise RuntimeError(f"{op}: groups must be float32 [groups, size], got {describe(groups)}")
    count, size = groups.shape
    if four_bits and size not in (32, 64, 128):
        raise RuntimeError(f"{op}: size must be 32, 64 or 128, got {size}")
    if size < 1:
        raise RuntimeError(f"{op}: size must be 1 or more, got {size}")
    if not shares:
        raise RuntimeError(f"{op}: shares must not be empty")
    codes = groups.new_empty((count, size // 2 if four_bits else size), dtype=CODES[format])
    zeros = groups.new_empty((count,), dtype=torch.uint8) if format == "int4" else None
    return codes, groups.new_empty((count,)), zeros


def _quantize_groups(groups, format, shares):
    _groups_outputs(groups, format, shares)
    return reference(OP, "quantize_groups_reference")(groups, format, shares)


@export
def nf4_table() -> list[float]:
    return list(reference("quantized_linear", "NF4"))


implement(OP, quantized_linear)
implement_autocast(OP, _autocast, "cpu", "cuda")
implement_kernel("quantized_linear_forward", _outputs, _forward)
implement_kernel("quantized_linear_tiles", _outputs, _forward)
implement_kernel("quantized_linear_backward", _backward_outputs, _backward)
implement_kernel("dequantize_weight", _dequantize_outputs, _dequantize)
implement_kernel("quantize_groups", _groups_outputs, _quantize_groups)
