"""layer_norm, rms_norm and their variants in plain PyTorch; the C++ version is in csrc/ops/norm."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.uncompiled.checks import (
    check_floating,
    check_output_format,
    check_same_device,
    describe,
    quantized_rows_outputs,
)
from fusedops.uncompiled.library import (
    RANDOM,
    define,
    draw_seed,
    export,
    has_kernel,
    implement,
    implement_autocast,
    implement_kernel,
    needs_gradient,
    reference,
    with_graph,
)

define(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None,"
    " float eps=1e-05) -> Tensor",
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,"
    " str rounding='torch', float offset=0.0) -> Tensor",
    "rms_norm_quantized(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,"
    " float? eps=None, *, str rounding='torch', float offset=0.0, str output_format='int8')"
    " -> (Tensor codes, Tensor scale)",
    "norm_quantized(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims, float eps,"
    " str kind, float offset, float dropout_p, Tensor? seed, str output_format)"
    " -> (Tensor codes, Tensor scale, Tensor h)",
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims, float eps,"
    " str kind, float offset, float dropout_p, Tensor? seed) -> (Tensor y, Tensor h, Tensor stats)",
    "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor stats,"
    " int dims, float eps, str kind, float offset, float dropout_p, Tensor? seed,"
    " bool[4] output_mask)"
    " -> (Tensor dresidual, Tensor dx, Tensor dweight, Tensor dbias)",
    "dropout_mask(Tensor seed, SymInt rows, SymInt n, float p) -> Tensor",
)
define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None,"
    " float eps=1e-05, *, float dropout_p=0.0) -> (Tensor y, Tensor h)",
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
    " str rounding='llama', float offset=0.0, float dropout_p=0.0) -> (Tensor y, Tensor h)",
    "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
    " str rounding='llama', float offset=0.0, float dropout_p=0.0, str output_format='int8')"
    " -> (Tensor codes, Tensor scale, Tensor h)",
    tags=RANDOM,
)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if input.is_nested:  # torch's own
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    dims = _normalized_dims("layer_norm", input, normalized_shape)
    _check("layer_norm", input, None, weight, bias, dims)
    if has_kernel("norm_forward", input, weight, bias):
        return _by_kernels(input, None, weight, bias, dims, eps, "layer", 0.0, 0.0)[0]
    run = reference("norm", "layer_norm_reference")
    return run(input, normalized_shape, weight, bias, eps).contiguous()


def rms_norm(input, normalized_shape, weight=None, eps=None, *, rounding="torch", offset=0.0):
    if (input.is_nested or input.is_complex()) and _torch_has(rounding, offset):
        return F.rms_norm(input, normalized_shape, weight, eps)
    dims = _normalized_dims("rms_norm", input, normalized_shape)
    _check_rounding("rms_norm", rounding)
    _check("rms_norm", input, None, weight, None, dims)
    if has_kernel("norm_forward", input, weight):
        kind, eps = _rms(rounding, eps)
        return _by_kernels(input, None, weight, None, dims, eps, kind, offset, 0.0)[0]
    run = reference("norm", "rms_norm_reference")
    return run(input, normalized_shape, weight, eps, rounding=rounding, offset=offset).contiguous()


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, dropout_p=0.0):
    dims = _row_dims("add_layer_norm", weight)
    _check("add_layer_norm", x, residual, weight, bias, dims, dropout_p)
    if has_kernel("norm_forward", x, residual, weight, bias):
        return _by_kernels(x, residual, weight, bias, dims, eps, "layer", 0.0, dropout_p)
    run = reference("norm", "add_layer_norm_reference")
    y, h = run(x, residual, weight, bias, eps, dropout_p=dropout_p)
    return y.contiguous(), h.contiguous()


def add_rms_norm(
    x, residual, weight=None, eps=1e-6, *, rounding="llama", offset=0.0, dropout_p=0.0
):
    _check_rounding("add_rms_norm", rounding)
    dims = _row_dims("add_rms_norm", weight)
    _check("add_rms_norm", x, residual, weight, None, dims, dropout_p)
    if has_kernel("norm_forward", x, residual, weight):
        kind, eps = _rms(rounding, eps)
        return _by_kernels(x, residual, weight, None, dims, eps, kind, offset, dropout_p)
    run = reference("norm", "add_rms_norm_reference")
    options = {"rounding": rounding, "offset": offset, "dropout_p": dropout_p}
    y, h = run(x, residual, weight, eps, **options)
    return y.contiguous(), h.contiguous()


def rms_norm_quantized(
    input, normalized_shape, weight=None, eps=None, *, rounding="torch", offset=0.0,
    output_format="int8",
):  # fmt: skip
    dims = _normalized_dims("rms_norm", input, normalized_shape)
    _check_rounding("rms_norm", rounding)
    _check("rms_norm", input, None, weight, None, dims)
    _check_quantized("rms_norm", dims, input, output_format, input, weight)
    run = reference("norm", "rms_norm_quantized_reference")
    options = {"rounding": rounding, "offset": offset, "output_format": output_format}
    return run(input, normalized_shape, weight, eps, **options)


def add_rms_norm_quantized(
    x, residual, weight=None, eps=1e-6, *, rounding="llama", offset=0.0, dropout_p=0.0,
    output_format="int8",
):  # fmt: skip
    _check_rounding("add_rms_norm", rounding)
    dims = _row_dims("add_rms_norm", weight)
    _check("add_rms_norm", x, residual, weight, None, dims, dropout_p)
    _check_quantized("add_rms_norm", dims, x, output_format, x, residual, weight)
    run = reference("norm", "add_rms_norm_quantized_reference")
    options = {"rounding": rounding, "offset": offset, "dropout_p": dropout_p}
    codes, scale, h = run(x, residual, weight, eps, **options, output_format=output_format)
    return codes, scale, h.contiguous()


# The kernels, with gradients: csrc/ops/norm/autograd.cpp.


def _by_kernels(x, residual, weight, bias, dims, eps, kind, offset, dropout_p):
    seed = draw_seed(x, dropout_p)
    arguments = x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed
    if needs_gradient(x, residual, weight, bias):
        return _Norm.apply(*arguments)
    return torch.ops.fusedops.norm_forward(*arguments)[:2]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed):
        arguments = x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed
        y, h, stats = torch.ops.fusedops.norm_forward(*arguments)
        ctx.set_materialize_grads(False)
        if h is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(h)
        ctx.save_for_backward(x if h is None else h, weight, bias, stats, seed)
        ctx.options = dims, eps, kind, offset, dropout_p
        ctx.base = y.dtype if kind != "rms_llama" or weight is None else _base(x, h, weight)
        ctx.dtype = y.dtype
        return y, h

    @staticmethod
    def backward(ctx, dy, dh):
        dims, eps, kind, offset, p = ctx.options
        of_x, of_residual, *of_row = ctx.needs_input_grad[:4]
        if dy is None and (dh is None or not p):
            return dh if of_x else None, dh if of_residual else None, *(None,) * 8
        h, weight, bias, stats, seed = ctx.saved_tensors
        if dy is None:  # the kernel knows the mask
            dy, of_row = torch.zeros_like(h, dtype=ctx.dtype), [False, False]
        if torch.is_grad_enabled():
            d, dweight, dbias = _with_graph(dy, dh, h, weight, bias, ctx.options, ctx.base)
            dx = None if d is None else _dropped(d, p, seed, dims)
        else:
            mask = [of_residual or (of_x and not p), of_x and p > 0, *of_row]
            arguments = dy, dh, h, weight, bias, stats, dims, eps, kind, offset, p, seed, mask
            d, dx, dweight, dbias = torch.ops.fusedops.norm_backward(*arguments)
            dx = dx if p else d
        return dx if of_x else None, d if of_residual else None, dweight, dbias, *(None,) * 6


def _base(x: Tensor, h: Tensor | None, weight: Tensor) -> torch.dtype:
    """The value that llama's rounding rounds before multiplying with the weight."""
    return h.dtype if h is not None and weight.dtype == h.dtype else x.dtype


def _with_graph(dy, dh, h, weight, bias, options, base):
    """The reference's gradients of h, weight and bias, for a double backward."""
    dims, eps, kind, offset, _ = options
    shape = h.shape[h.dim() - dims :]

    def norm(h, weight, bias):
        if kind == "layer":
            run = reference("norm", "layer_norm_reference")
            return (run(h, shape, weight, bias, eps, base),)
        run = reference("norm", "rms_norm_reference")
        rounding = "llama" if kind == "rms_llama" else "torch"
        return (run(h, shape, weight, eps, rounding=rounding, offset=offset, dtype=base),)

    d, dweight, dbias = with_graph(norm, (h, weight, bias), (dy,))
    return d if dh is None or d is None else d + dh, dweight, dbias


def _dropped(d, p, seed, dims):
    if not p:
        return d
    rows, n = math.prod(d.shape[: d.dim() - dims]), math.prod(d.shape[d.dim() - dims :])
    keep = torch.ops.fusedops.dropout_mask(seed, rows, n, p).reshape(d.shape)
    return d * keep * (0.0 if p == 1 else 1 / (1 - p))


def _rms(rounding: str, eps: float | None) -> tuple[str, float]:
    """A kernel's kind and its eps."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return "rms" if rounding == "torch" else "rms_llama", eps


def _torch_has(rounding: str, offset: float) -> bool:
    return rounding == "torch" and offset == 0


def _check_rounding(op: str, rounding: str) -> None:
    if rounding not in ("torch", "llama"):
        raise ValueError(f"{op}: rounding must be 'torch' or 'llama', got '{rounding}'")


def _normalized_dims(op: str, input: Tensor, shape: list[int]) -> int:
    """The number of dimensions in normalized_shape, which must be input's last ones."""
    dims = len(shape)
    if not dims:
        raise RuntimeError(f"{op}: normalized_shape must name at least one dimension, got []")
    if input.dim() < dims or list(input.shape[-dims:]) != list(shape):
        raise RuntimeError(
            f"{op}: normalized_shape must be the end of input's shape {list(input.shape)}, got "
            f"{list(shape)}"
        )
    return dims


def _row_dims(op: str, weight: Tensor | None) -> int:
    """The dimensions that add_* normalize: the weight's, or the last one without a weight."""
    if weight is not None and not weight.dim():
        raise RuntimeError(f"{op}: weight must have at least one dimension, got {describe(weight)}")
    return 1 if weight is None else weight.dim()


def _check(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: int,
    dropout_p: float = 0.0,
) -> None:
    name = "input" if residual is None else "x"
    check_floating(op, name, x)
    if x.dim() < dims:
        raise RuntimeError(
            f"{op}: {name} must have at least {dims} dimensions to normalise, got {describe(x)}"
        )
    if residual is not None:
        check_floating(op, "residual", residual)
        check_same_device(op, "residual", residual, "x", x)
        if residual.shape != x.shape:
            raise RuntimeError(
                f"{op}: residual must be {describe(x)} like x, got {describe(residual)}"
            )
    _check_row(op, "weight", weight, name, x, dims)
    _check_row(op, "bias", bias, name, x, dims)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"{op}: dropout_p must be in [0, 1], got {dropout_p}")


def _check_row(op: str, name: str, t: Tensor | None, like: str, x: Tensor, dims: int) -> None:
    if t is None:
        return
    check_floating(op, name, t)
    check_same_device(op, name, t, like, x)
    row = x.shape[x.dim() - dims :]
    if t.shape != row:
        raise RuntimeError(
            f"{op}: {name} must have shape {list(row)}, the end of {like}'s shape {list(x.shape)}, "
            f"got {describe(t)}"
        )


def _check_quantized(
    op: str, dims: int, x: Tensor, output_format: str, *tensors: Tensor | None
) -> None:
    check_output_format(op, output_format, *tensors)
    if dims != 1:
        row = list(x.shape[x.dim() - dims :])
        raise RuntimeError(f"{op}: output_format needs one normalised dimension, got {row}")


# The outputs that kernels fill: csrc/ops/norm/outputs.cpp.


@export
def norm_outputs(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed):
    op = (
        ("layer_norm" if kind == "layer" else "rms_norm")
        if residual is None
        else ("add_layer_norm" if kind == "layer" else "add_rms_norm")
    )
    _check(op, x, residual, weight, bias, dims, dropout_p)
    h = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = h if weight is not None and weight.dtype == h else x.dtype
    if kind == "rms_llama" and weight is not None:
        y = torch.promote_types(y, weight.dtype)
    rows = math.prod(x.shape[: x.dim() - dims])
    stats = x.new_empty((2 if kind == "layer" else 1, rows), dtype=torch.float64)
    stream = None if residual is None else _empty(x, h)
    return _empty(x, y), stream, stats


def _quantized_outputs(
    x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed, output_format
):
    op = "rms_norm" if residual is None else "add_rms_norm"
    _check(op, x, residual, weight, bias, dims, dropout_p)
    _check_quantized(op, dims, x, output_format)
    return *quantized_rows_outputs(x, x.shape, output_format), (
        None if residual is None else _empty(x, torch.promote_types(x.dtype, residual.dtype))
    )


def _quantized(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed, output_format):
    h = x
    if residual is not None:
        h = residual + reference("norm", "dropout_reference")(x, dropout_p, dims, seed)
    dtype = x.dtype if weight is None else _base(x, h, weight)
    options = {"rounding": "torch" if kind == "rms" else "llama", "offset": offset}
    run = reference("norm", "rms_norm_quantized_reference")
    row = h.shape[h.dim() - dims :]
    pair = run(h, row, weight, eps, dtype=dtype, output_format=output_format, **options)
    return *pair, None if residual is None else h.contiguous()


@export
def norm_backward_outputs(
    dy, dh, h, weight, bias, stats, dims, eps, kind, offset, dropout_p, seed, output_mask
):
    _check_row("norm_backward", "weight", weight, "h", h, dims)
    _check_row("norm_backward", "bias", bias, "h", h, dims)
    like = h, h, weight, bias
    return tuple(
        _empty(t, t.dtype) if wanted else None for t, wanted in zip(like, output_mask, strict=True)
    )


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


# Autocast, on GPUs only: InFloat32 of csrc/ops/norm/autograd.cpp.


def _wide(t: Tensor | None) -> Tensor | None:
    narrow = t is not None and t.dtype in (torch.float16, torch.bfloat16)
    return t.float() if t is not None and narrow else t


def _layer_norm_autocast(cast, input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return torch.ops.fusedops.layer_norm(
        _wide(input), normalized_shape, _wide(weight), _wide(bias), eps
    )


def _rms_norm_autocast(
    cast, input, normalized_shape, weight=None, eps=None, *, rounding="torch", offset=0.0
):
    if _torch_has(rounding, offset):
        input, weight = _wide(input), _wide(weight)
    return torch.ops.fusedops.rms_norm(
        input, normalized_shape, weight, eps, rounding=rounding, offset=offset
    )


def _add_layer_norm_autocast(cast, x, residual, weight=None, bias=None, eps=1e-5, *, dropout_p=0.0):
    weight, bias = _wide(weight), _wide(bias)
    y, h = torch.ops.fusedops.add_layer_norm(x, residual, weight, bias, eps, dropout_p=dropout_p)
    if _wide(y) is y:
        return y, h
    return layer_norm(_wide(h), _row(h, weight), weight, bias, eps), h


def _add_rms_norm_autocast(
    cast, x, residual, weight=None, eps=1e-6, *, rounding="llama", offset=0.0, dropout_p=0.0
):
    options = {"rounding": rounding, "offset": offset}
    torchs = _torch_has(rounding, offset)
    weight = _wide(weight) if torchs else weight
    add = torch.ops.fusedops.add_rms_norm
    y, h = add(x, residual, weight, eps, dropout_p=dropout_p, **options)
    if not torchs or _wide(y) is y:
        return y, h
    return rms_norm(_wide(h), _row(h, weight), weight, eps, **options), h


def _row(h: Tensor, weight: Tensor | None) -> list[int]:
    return list(h.shape[-1:] if weight is None else weight.shape)


def _dropout_mask_outputs(seed, rows, n, p):
    return seed.new_empty((rows, n), dtype=torch.bool)


def _dropout_mask(seed, rows, n, p):
    return reference("norm", "dropout_mask_reference")(seed, rows, n, p)


implement("layer_norm", layer_norm, takes_nested=True)
implement("rms_norm", rms_norm, takes_nested=True)
implement("add_layer_norm", add_layer_norm)
implement("add_rms_norm", add_rms_norm)
implement("rms_norm_quantized", rms_norm_quantized)
implement("add_rms_norm_quantized", add_rms_norm_quantized)
implement_autocast("layer_norm", _layer_norm_autocast, "cuda")
implement_autocast("rms_norm", _rms_norm_autocast, "cuda")
implement_autocast("add_layer_norm", _add_layer_norm_autocast, "cuda")
implement_autocast("add_rms_norm", _add_rms_norm_autocast, "cuda")
implement_kernel("norm_forward", norm_outputs)
implement_kernel("norm_backward", norm_backward_outputs)
implement_kernel("norm_quantized", _quantized_outputs, _quantized)
implement_kernel("dropout_mask", _dropout_mask_outputs, _dropout_mask)
