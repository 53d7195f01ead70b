"""rotary_embedding, a fused version of transformers' apply_rotary_pos_emb.

Encodes positions as rotations of pairs of elements: Su et al., arXiv:2104.09864. One pass over q
and k forward, and one over their gradients backward; only cos and sin are stored.
"""

from torch import Tensor

from fusedops.extension import _C, ops, traced

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
    same, except for its heads and width. cos, sin: [batch or 1, seq, rotary]; both are unsqueezed
    at unsqueeze_dim and broadcast. rotary is even; a head's elements beyond it are copied. A pair
    has one element in the first half of the rotary elements and one in the second (Llama). With
    interleaved, it is two neighbours (GPT-J, Cohere). All are float32, float16, bfloat16 or
    float64, with any strides; a transposed view is read in place. Fewer dimensions work too, and
    others broadcast as in torch.

    Returns q and k rotated, each in the dtype that it, cos and sin promote to, and in its input's
    memory order of heads and sequence. Computed in float32 (float64 for float64) and rounded once,
    where transformers' code rounds three times. Gradients for cos and sin run ATen calls. Raises
    RuntimeError if a shape or dtype does not fit, and ValueError for an unsupported unsqueeze_dim.
    Su et al., arXiv:2104.09864.
    """
    run = ops.rotary_embedding if traced(q, k, cos, sin) else _C.rotary_embedding
    return run(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=interleaved)
