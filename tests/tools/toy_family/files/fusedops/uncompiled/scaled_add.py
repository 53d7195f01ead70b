"""scaled_add in plain PyTorch, as csrc/ops/scaled_add."""

from fusedops.uncompiled.checks import check_floating, check_same_device, describe
from fusedops.uncompiled.library import define, implement, implement_kernel, reference

define(
    "scaled_add(Tensor x, Tensor residual, float scale=1.0) -> Tensor",
    "scaled_add_forward(Tensor x, Tensor residual, float scale) -> Tensor",
    "scaled_add_backward(Tensor dy, float scale) -> Tensor",
)


def scaled_add(x, residual, scale=1.0):
    _outputs(x, residual, scale)
    return reference("scaled_add", "scaled_add_reference")(x, residual, scale).contiguous()


def _outputs(x, residual, scale):
    check_floating("scaled_add", "x", x)
    check_same_device("scaled_add", "residual", residual, "x", x)
    if residual.dtype != x.dtype or residual.shape != x.shape:
        raise RuntimeError(
            f"scaled_add: residual must be {describe(x)} like x, got {describe(residual)}"
        )
    return x.new_empty(x.shape)


def _backward_outputs(dy, scale):
    check_floating("scaled_add_backward", "dy", dy)
    return dy.new_empty(dy.shape)


implement("scaled_add", scaled_add)
implement_kernel("scaled_add_forward", _outputs)
implement_kernel("scaled_add_backward", _backward_outputs)
