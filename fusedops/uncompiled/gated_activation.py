"""The gated activations in plain PyTorch; the C++ version is in csrc/ops/gated_activation."""

from torch import Tensor

from fusedops.uncompiled.checks import (
    check_floating,
    check_output_format,
    check_same_device,
    describe,
    dtype_name,
    quantized_rows_outputs,
)
from fusedops.uncompiled.library import define, implement, implement_kernel, reference

define(
    "swiglu(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0,"
    " float up_offset=0.0) -> Tensor",
    "geglu(Tensor gate, Tensor? up=None, *, str approximate='none') -> Tensor",
    "swiglu_quantized(Tensor gate, Tensor? up=None, *, float? limit=None, float alpha=1.0,"
    " float up_offset=0.0, str output_format='int8') -> (Tensor codes, Tensor scale)",
    "gated_activation_quantized(Tensor gate, Tensor? up, str kind, float? limit, float alpha,"
    " float up_offset, str output_format) -> (Tensor codes, Tensor scale)",
    "gated_activation_forward(Tensor gate, Tensor? up, str kind, float? limit, float alpha,"
    " float up_offset) -> Tensor",
    "gated_activation_backward(Tensor dy, Tensor gate, Tensor? up, str kind, float? limit,"
    " float alpha, float up_offset, bool[2] output_mask) -> (Tensor dgate, Tensor dup)",
)


def swiglu(gate, up=None, *, limit=None, alpha=1.0, up_offset=0.0):
    _check("swiglu", gate, up, limit)
    run = reference("gated_activation", "swiglu_reference")
    return run(gate, up, limit=limit, alpha=alpha, up_offset=up_offset).contiguous()


def swiglu_quantized(gate, up=None, *, limit=None, alpha=1.0, up_offset=0.0, output_format="int8"):
    check_output_format("swiglu", output_format, gate, up)
    _check("swiglu", gate, up, limit)
    if not gate.dim():
        raise RuntimeError(
            f"swiglu: output_format needs at least one dimension, got {describe(gate)}"
        )
    run = reference("gated_activation", "swiglu_quantized_reference")
    options = {"limit": limit, "alpha": alpha, "up_offset": up_offset}
    return run(gate, up, **options, output_format=output_format)


def geglu(gate, up=None, *, approximate="none"):
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate must be 'none' or 'tanh', got '{approximate}'")
    _check("geglu", gate, up, None)
    run = reference("gated_activation", "geglu_reference")
    return run(gate, up, approximate=approximate).contiguous()


def _check(op: str, gate: Tensor, up: Tensor | None, limit: float | None) -> None:
    check_floating(op, "gate", gate)
    if up is None and (not gate.dim() or gate.shape[-1] % 2):
        raise RuntimeError(
            f"{op}: without up, gate must be packed, gate and up side by side in a last dimension "
            f"of even size, got {describe(gate)}"
        )
    if up is not None:
        check_floating(op, "up", up)
        check_same_device(op, "up", up, "gate", gate)
        if up.shape != gate.shape:
            raise RuntimeError(
                f"{op}: up must have shape {list(gate.shape)} like gate, got {describe(up)}"
            )
    if limit is not None and not limit >= 0:
        raise ValueError(f"{op}: limit must be at least 0, got {limit:g}")


def _outputs(gate, up, kind, limit, alpha, up_offset):
    _check("swiglu" if kind == "swiglu" else "geglu", gate, up, limit)
    _check_dtype("up", up, gate)
    shape = list(gate.shape)
    if up is None:
        shape[-1] //= 2
    return gate.new_empty(shape)


def _quantized_outputs(gate, up, kind, limit, alpha, up_offset, output_format):
    y = _outputs(gate, up, kind, limit, alpha, up_offset)
    return quantized_rows_outputs(gate, y.shape, output_format)


def _backward_outputs(dy, gate, up, kind, limit, alpha, up_offset, output_mask):
    _check_dtype("up", up, gate)
    _check_dtype("dy", dy, gate)
    dup = output_mask[1] and up is not None
    return gate.new_empty(gate.shape) if output_mask[0] else None, (
        gate.new_empty(gate.shape) if dup else None
    )


def _check_dtype(name: str, t: Tensor | None, gate: Tensor) -> None:
    if t is not None and t.dtype != gate.dtype:
        wanted = dtype_name(gate.dtype)
        raise RuntimeError(
            f"gated_activation: {name} must be {wanted} like gate, got {describe(t)}"
        )


implement("swiglu", swiglu)
implement("geglu", geglu)
implement("swiglu_quantized", swiglu_quantized)
implement_kernel("gated_activation_forward", _outputs)
implement_kernel("gated_activation_quantized", _quantized_outputs)
implement_kernel("gated_activation_backward", _backward_outputs)
