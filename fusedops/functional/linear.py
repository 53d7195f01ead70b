"""linear: a product with its bias and its activation, forward and backward, and its reference."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.extension import _C, traced
from fusedops.functional.jagged import operator

__all__ = ["linear"]


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`F.linear` and the activation that follows it.

        z = input weight^T + bias
        y = activation(z)           None, "relu", "gelu", "gelu_tanh" or "silu"

    input: [..., K]; weight: [N, K], any strides, so a transposed view too; bias: [N]. "gelu" is
    `F.gelu`, "gelu_tanh" its `approximate="tanh"`. float32, float16 and bfloat16 have kernels; what
    else `F.linear` takes is computed by it. Returns y, [..., N], in input's dtype, with sums in
    float32. Where torch's own lines are faster (small sizes; products on CPUs that are not AMD's)
    they run. Raises what `F.linear` raises, and ValueError for another activation. Hendrycks and
    Gimpel, arXiv:1606.08415; Elfwing et al., arXiv:1702.03118.
    """
    seen = traced(input, weight, bias)
    op = operator("linear", input, weight, bias) if seen else _C.linear
    return op(input, weight, bias, activation)


# Reference: plain PyTorch that follows the input's dtype. With float64 inputs it is exact, so both
# GELUs are without the cancellation that torch's formulas have in their tails.


ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": lambda z: z * torch.erfc(-z / math.sqrt(2)) / 2,
    "gelu_tanh": lambda z: z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
    "silu": lambda z: z * torch.sigmoid(z),
}


def linear_reference(input, weight, bias=None, activation=None):
    z = F.linear(input, weight, bias)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    return ACTIVATIONS[activation](wide).to(z.dtype)
