"""linear in plain PyTorch; the C++ version is in csrc/ops/linear."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fusedops.uncompiled.checks import (
    ACTIVATIONS,
    check_activation,
    check_floating,
    check_like,
    check_shape,
    describe,
)
from fusedops.uncompiled.library import (
    define,
    export,
    implement,
    implement_autocast,
    implement_kernel,
)

define(
    "linear(Tensor input, Tensor weight, Tensor? bias=None, str? activation=None) -> Tensor",
    "linear_forward(Tensor input, Tensor weight, Tensor? bias, str activation, bool keep_z)"
    " -> (Tensor y, Tensor z)",
    "linear_backward(Tensor dy, Tensor? input, Tensor? weight, Tensor? z, str activation,"
    " bool[3] output_mask) -> (Tensor dinput, Tensor dweight, Tensor dbias)",
)

ACTIVATE: dict[str | None, Callable] = {
    None: lambda z: z,
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def linear(input, weight, bias=None, activation=None):
    if activation not in (None, *ACTIVATIONS):
        known = ", ".join(map(repr, (None, *ACTIVATIONS[:-1])))
        raise ValueError(
            f"linear: activation must be {known} or {ACTIVATIONS[-1]!r}, got '{activation}'"
        )
    return ACTIVATE[activation](F.linear(input, weight, bias))


def _autocast(cast, input, weight, bias=None, activation=None):
    return torch.ops.fusedops.linear(cast(input), cast(weight), cast(bias), activation)


def _outputs(input, weight, bias, activation, keep_z):
    op = "linear_forward"
    check_activation(op, activation)
    check_floating(op, "input", input)
    check_like(op, "weight", weight, "input", input)
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise RuntimeError(
            f"{op}: weight must have shape [N, {input.shape[-1]}] for input {list(input.shape)}, "
            f"got {describe(weight)}"
        )
    if bias is not None:
        check_like(op, "bias", bias, "input", input)
        check_shape(op, "bias", bias, weight.shape[:1])
    shape = (*input.shape[:-1], weight.shape[0])
    return input.new_empty(shape), input.new_empty(shape) if keep_z else None


def _backward_outputs(dy, input, weight, z, activation, output_mask):
    op = "linear_backward"
    check_activation(op, activation)
    missing = (output_mask[0] and weight is None) or (output_mask[1] and input is None)
    if missing or (activation != "none" and z is None):
        raise RuntimeError(f"{op}: dinput needs weight, dweight needs input, an activation needs z")
    for name, t in (("input", input), ("weight", weight), ("z", z)):
        if t is not None:
            check_like(op, name, t, "dy", dy)
    if z is not None:
        check_shape(op, "z", z, dy.shape)
    columns = dy.shape[-1]
    return (
        dy.new_empty((*dy.shape[:-1], weight.shape[1])) if output_mask[0] else None,
        dy.new_empty((columns, input.shape[-1])) if output_mask[1] else None,
        dy.new_empty((columns,)) if output_mask[2] else None,
    )


@export
def linear_always(asked: bool) -> None:
    """Sets whether `linear` runs its kernel at any size; there is none here."""


@export
def own_product_pays(
    dtype: torch.dtype, rows: int, columns: int, depth: int, transposed: bool
) -> bool:
    """Whether our own matmul is faster than torch's; there is none here."""
    return False


@export
def few_rows_pay(dtype: torch.dtype, rows: int, columns: int, depth: int, transposed: bool) -> bool:
    """Whether our own matmul of a few rows is faster than torch's; there is none here."""
    return False


implement("linear", linear, takes_nested=True)
implement_autocast("linear", _autocast, "cpu", "cuda")
implement_kernel("linear_forward", _outputs)
implement_kernel("linear_backward", _backward_outputs)
