"""linear: a matmul with bias and activation, with its reference."""

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
    """`F.linear` followed by an activation.

        z = input weight^T + bias
        y = activation(z)           None, "relu", "gelu", "gelu_tanh" or "silu"

    input: [..., K]. weight: [N, K], any strides, including a transposed view. bias: [N]. "gelu" is
    `F.gelu`; "gelu_tanh" is `F.gelu(approximate="tanh")`. float32, float16 and bfloat16 have
    kernels; `F.linear` computes anything else that it accepts. Returns y, [..., N], in input's
    dtype; sums are float32. Torch's own code runs if it is faster: for small sizes, and for float32
    matmuls of many rows on CPUs other than AMD's. Raises what `F.linear` raises, and ValueError for
    an unknown activation. Hendrycks and Gimpel, arXiv:1606.08415; Elfwing et al., arXiv:1702.03118.
    """
    seen = traced(input, weight, bias)
    op = operator("linear", input, weight, bias) if seen else _C.linear
    return op(input, weight, bias, activation)


# Reference: plain PyTorch in the input's dtype, exact for float64 inputs. That is why both GELUs
# avoid the cancellation in the tails of torch's formulas.


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
