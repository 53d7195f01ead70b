"""scaled_copy in plain PyTorch; the C++ version is in csrc/ops/scaled_copy."""

from fusedops.uncompiled.checks import check_floating
from fusedops.uncompiled.library import define, implement, implement_kernel, reference

define(
    "scaled_copy(Tensor x, float scale=1.0) -> Tensor",
    "scaled_copy_forward(Tensor x, float scale) -> Tensor",
)


def scaled_copy(x, scale=1.0):
    _outputs(x, scale)
    return reference("scaled_copy", "scaled_copy_reference")(x, scale).contiguous()


def _outputs(x, scale):
    check_floating("scaled_copy", "x", x)
    return x.new_empty(x.shape)


implement("scaled_copy", scaled_copy)
implement_kernel("scaled_copy_forward", _outputs)
