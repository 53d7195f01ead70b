"""Triton attention's forward loop for sm_90: matmuls overlap the softmax.

An iteration issues the previous tile's product, probabilities times values, before this tile's
softmax, and nothing waits for it until the next tile's scores. So the sums are one tile behind, and
the last product follows the loop. Triton leaves a product in flight only if the next iteration
reads its result, behind a wait: the sums are therefore rescaled one iteration late.

The diagonal's tiles come last and in the same loop, whose branch skips whole tiles' masks. The copy
engine loads the tiles; threads that copy would need registers for addresses.
"""

import triton
import triton.language as tl

from fusedops.triton.attention.scores import curved, exponentials, masked, move, product


@triton.jit
def rows_from(t, count, stride, N: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """A descriptor of a sequence's rows, [count, WIDTH], for tiles [N, D]; 0 outside."""
    rows = tl.maximum(count, 1)  # a descriptor cannot be empty
    return tl.make_tensor_descriptor(t, [rows, WIDTH], [stride, 1], [N, D])


@triton.jit
def add_tiles(
    sums,
    block,
    of_keys,
    of_values,
    i,
    tiles,
    lead,
    window,
    n_k,
    softmax,
    MAP: tl.constexpr,
    N: tl.constexpr,
):
    """Attention over the keys' tiles [begin, end). Returns sums, max_score and total.

    of_keys, of_values: descriptors. softmax: curve, max_score and total of no tiles. Without tiles,
    it processes one that is past the last key.
    """
    begin, end, whole_begin, whole_end = tiles
    curve, max_score, total = softmax
    start = tl.where(begin < end, begin * N - lead, tl.maximum(n_k, 1))
    x = curved(product(block, tl.trans(of_keys.load([start, 0]))), curve, MAP)
    if (begin < whole_begin) | (begin >= whole_end):
        x = masked(x, None, None, i, start + tl.arange(0, N)[None, :], window, n_k, True)
    p, max_score, total, factor = extend(x, max_score, total, curve, MAP)
    for t in range(begin + 1, end):
        x = curved(product(block, tl.trans(of_keys.load([t * N - lead, 0]))), curve, MAP)
        if (t < whole_begin) | (t >= whole_end):  # before the next product is in flight
            j = t * N - lead + tl.arange(0, N)[None, :]
            x = masked(x, None, None, i, j, window, n_k, True)
        # If the loop carried p in 16 bits, Triton would wait for the product at once.
        sums = sums * factor + product(p.to(block.dtype), of_values.load([start, 0]))
        p, max_score, total, factor = extend(x, max_score, total, curve, MAP)
        start = t * N - lead
    sums = sums * factor + product(p.to(block.dtype), of_values.load([start, 0]))
    return sums, max_score, total


@triton.jit
def extend(x, max_score, total, curve, MAP: tl.constexpr):
    """exp(score - max_score) of scores x, the softmax's state, and the factor for earlier sums."""
    max_score, factor = move(max_score, x, curve, MAP)
    p = exponentials(x, max_score, curve, MAP)
    return p, max_score, total * factor + tl.sum(p, 1, keep_dims=True), factor
