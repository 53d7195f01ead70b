"""rotary_embedding, transformers' apply_rotary_pos_emb, and its reference.

Positions as rotations of pairs of elements: Su et al., arXiv:2104.09864. One pass over q and k
forward and one over their gradients backward, which keeps nothing but cos and sin.
"""

import torch
from torch import Tensor

from fusedops.extension import _C, traced

__all__ = ["rotary_embedding"]


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of elements of q and k, in one pass over memory.

        y = x * cos + quarter_turn(x) * sin      (a, b) -> (-b, a) of each pair

    q: [batch, heads, seq, width] with unsqueeze_dim=1, [batch, seq, heads, width] with 2. k: the
    same but for its heads and width. cos, sin: [batch or 1, seq, rotary], both unsqueezed at
    unsqueeze_dim and broadcast. rotary is even; the elements of a head past it are copied. A pair
    is an element of the first half of these and one of the second (Llama), or interleaved two
    neighbours (GPT-J, Cohere). All are float32, float16, bfloat16 or float64, of any strides: a
    transposed view is read where it lies. Fewer dimensions do, and others as torch broadcasts them.

    Returns q and k rotated: each in the dtype that it, cos and sin promote to, and with the heads
    inside the sequence in memory where its input has them so. Computed in float32 (float64 for
    float64) and rounded once, where transformers' lines round three times. Gradients of cos and
    sin take ATen calls. Raises RuntimeError when a shape or a dtype does not fit, ValueError for
    another unsqueeze_dim. Su et al., arXiv:2104.09864.
    """
    run = torch.ops.fusedops.rotary_embedding if traced(q, k, cos, sin) else _C.rotary_embedding
    return run(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=interleaved)


# Reference: plain PyTorch that follows the input's dtype. With float64 inputs it is exact.


def rotary_embedding_reference(q, k, cos, sin, *, unsqueeze_dim=1, interleaved=False):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1]

    def rotated(x):
        y = x[..., :n] * cos + _quarter_turn(x[..., :n], interleaved) * sin
        if x.shape[-1] == n:
            return y
        return torch.cat([y, x[..., n:].expand(*y.shape[:-1], -1)], -1)

    return rotated(q), rotated(k)


def _quarter_turn(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)
