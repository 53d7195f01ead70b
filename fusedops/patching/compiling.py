"""Where a site steps aside under torch.compile.

An operator is opaque to it: of small tensors, what Inductor would have fused costs more than the
operator gains. Measured on CPUs, in elements of the site's input; on GPUs nobody measured.
"""

from torch import Tensor
from torch.compiler import is_compiling
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["inductor_fuses", "inductor_multiplies"]

LOOP = 2**18  # of a norm, a sum and its norm, a gated product, a rotation
PRODUCT = 2**16  # of a linear


def inductor_fuses(x: Tensor) -> bool:
    """Whether Inductor's own loop over x is to run."""
    return is_compiling() and _is_few(x, LOOP)


def inductor_multiplies(x: Tensor) -> bool:
    """Whether the product of x that Inductor calls is to run."""
    return is_compiling() and _is_few(x, PRODUCT)


def _is_few(x: Tensor, elements: int) -> bool:
    """Without a guard: of sizes that are symbols it is not known."""
    return x.device.type == "cpu" and statically_known_true(x.numel() < elements)
