"""linear: a matmul with bias and activation."""

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
