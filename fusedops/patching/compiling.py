"""Where a site steps aside under torch.compile, and strict torch.export, which traces alike.

An operator is opaque to Inductor: of small tensors, what it would have fused costs more than the
operator gains; of large ones loops are as fast as operators, and products of ours faster than the
ones that it calls. Measured on CPUs, in elements of the site's input; on GPUs nobody measured.
"""

from typing import Any

from torch import SymBool, Tensor
from torch.compiler import is_compiling
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedops.backends import forced

__all__ = ["inductor_fuses", "inductor_multiplies", "known"]

LOOP = 2**18  # of a norm, a sum and its norm, a gated product, a rotation
PRODUCT = 2**16  # of a linear


def inductor_fuses(x: Any) -> bool:
    """Whether Inductor's own loop over x is to run: also of a size that is a symbol."""
    return _may_compile(x) and not known(x.numel() >= LOOP)


def inductor_multiplies(x: Any) -> bool:
    """Whether the product of x that Inductor calls is to run."""
    return _may_compile(x) and known(x.numel() < PRODUCT)


def known(condition: bool | SymBool) -> bool:
    """Whether a condition on sizes is true. A question about symbols would be a guard, for which a
    graph is made again or an export refused: what is true of some sizes alone is not known.
    """
    return statically_known_true(condition)


def _may_compile(x: Any) -> bool:
    return is_compiling() and isinstance(x, Tensor) and x.device.type == "cpu" and forced() is None
