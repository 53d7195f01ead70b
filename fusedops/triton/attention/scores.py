"""Triton attention's helpers: block positions, masks, tile loads, scores and softmax.

Formulas: csrc/kernels/attention.h. Scores are [M, N], queries by keys. i, [M, 1], and j, [1, N],
are the positions of both in their sequence.
"""

import triton
import triton.language as tl

from fusedops.triton.tile import LOG2E, dropout, exact_exp, tanh

LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # int32
PIECE = tl.constexpr(16)  # of a row's width, in float32


@triton.jit
def block_of(
    x,
    cu_rows,
    cu_others,
    sequences,
    rows,
    others,
    R: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Block x of R rows: its start within its sequence, and both sequences' ranges.

    Returns the block's first row in its sequence, where the sequence begins and how many rows it
    has, and the same for the sequence on the other side. Without cu_seqlens, a batch is one
    sequence. Blocks are numbered across all sequences, so that no grid depends on the longest one,
    which the host does not know. Past the last block, the sequence has no rows. ALIGNED: a block's
    first row is a multiple of 4 among all rows; within its sequence it may then be negative.
    Without cu_others, the other side is a cache: its beginning is the sequence's number.
    """
    if cu_rows is None:
        none = x * 0
        return x * R, none, rows, none, others
    else:
        n = tl.arange(0, SEQUENCES)
        begin, count = _span(cu_rows, n, sequences, rows)
        lead = begin % 4 if ALIGNED else begin * 0
        blocks = tl.where(count > 0, (count + lead + R - 1) // R, 0)
        before = tl.cumsum(blocks, 0) - blocks
        mine = (before <= x) & (x < before + blocks)
        first = (x - _only(before, mine)) * R - _only(lead, mine)
        if cu_others is None:
            other_begin, other_count = n, tl.zeros_like(n) + others
        else:
            other_begin, other_count = _span(cu_others, n, sequences, others)
        return (
            first,
            _only(begin, mine),
            _only(count, mine),
            _only(other_begin, mine),
            _only(other_count, mine),
        )


@triton.jit
def _span(cu, n, sequences, rows):
    """Start and length of sequences n, int32."""
    begin = tl.load(cu + n, n < sequences, 0).to(tl.int32)
    end = tl.load(cu + n + 1, n < sequences, 0).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), rows)  # never reads outside the tensor
    return begin, tl.maximum(tl.minimum(end, rows) - begin, 0)


@triton.jit
def _only(t, mine):
    return tl.sum(tl.where(mine, t, 0), 0)


@triton.jit
def sees(i, j, window, n_k):
    """Which queries see which keys. window: (left, right, offset); None means unlimited.

    The bounds belong to whichever of i and j runs along the first axis, since a thread holds few
    rows of a tile and many columns.
    """
    left, right, offset = window
    exists = (j >= 0) & (j < n_k)
    if i.shape[0] == 1:
        low = tl.where(exists, j - (offset + right) if right is not None else LEAST, MOST)
        seen = i >= low
        if left is not None:
            seen &= i <= j + (left - offset)
    else:
        high = n_k if right is None else tl.minimum(i + (offset + right + 1), n_k)
        # As an unsigned number, a negative position is past the last key.
        seen = j.to(tl.uint32) < tl.maximum(high, 0).to(tl.uint32)
        if left is not None:
            seen &= j >= i + (offset - left)
    return seen


@triton.jit
def key_tiles(first, last, window, n_k, lead, N: tl.constexpr):
    """The tiles of N keys that queries first to last see: [begin, end).

    All queries see all of tiles [whole_begin, whole_end). Tile t starts at key t N - lead.
    """
    left, right, offset = window
    low, high, whole_low, whole_high = 0, n_k, 0, n_k
    if left is not None:
        low = tl.maximum(first + offset - left, 0)
        whole_low = tl.maximum(last + offset - left, 0)
    if right is not None:
        high = tl.minimum(last + offset + right + 1, n_k)
        whole_high = tl.minimum(first + offset + right + 1, n_k)
    return _tiles(low, high, whole_low, whole_high, lead, N)


@triton.jit
def query_tiles(first, last, window, n_q, M: tl.constexpr):
    """The tiles of M queries that see keys first to last, as in `key_tiles`."""
    left, right, offset = window
    low, high, whole_low, whole_high = 0, n_q, 0, n_q
    if right is not None:
        low = tl.maximum(first - offset - right, 0)
        whole_low = tl.maximum(last - offset - right, 0)
    if left is not None:
        high = tl.minimum(last - offset + left + 1, n_q)
        whole_high = tl.minimum(first - offset + left + 1, n_q)
    return _tiles(low, high, whole_low, whole_high, 0, M)


@triton.jit
def _tiles(low, high, whole_low, whole_high, lead, SIZE: tl.constexpr):
    begin = (low + lead) // SIZE
    end = tl.maximum((tl.maximum(high + lead, 0) + SIZE - 1) // SIZE, begin)
    whole_begin = tl.minimum((whole_low + lead + SIZE - 1) // SIZE, end)
    whole_end = tl.maximum(tl.maximum(whole_high + lead, 0) // SIZE, whole_begin)
    return begin, end, whole_begin, tl.minimum(whole_end, end)


@triton.jit
def edge(n, begin, whole_begin, whole_end):
    """The n-th partial tile: first the tiles before the whole ones, then the tiles after them."""
    return tl.where(n < whole_begin - begin, begin + n, whole_end + n - (whole_begin - begin))


@triton.jit
def rows_at(t, stride, first, count, R: tl.constexpr):
    """Pointers [R, 1] to rows [first, first + R) of t, and a mask of existing rows."""
    r = first + tl.arange(0, R)[:, None]
    return t + r.to(tl.int64) * stride, (r >= 0) & (r < count)


@triton.jit
def load_rows(
    t,
    stride,
    first,
    count,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Rows [first, first + R) of t, [R, D]; 0 past the width and for missing rows."""
    r, d = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    at = t + tl.cast(first, tl.int64) * stride + (r * stride + d)
    if EDGE:
        return tl.load(at, (first + r >= 0) & (first + r < count) & (d < WIDTH), 0)
    elif WIDTH == D:
        return tl.load(at)
    else:
        return tl.load(at, d < WIDTH, 0)


@triton.jit
def pages_of(table, pages, start, count, N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of keys [start, start + N), [N, 1] int64; one that does not exist is replaced."""
    r = start + tl.arange(0, N)[:, None]
    page = tl.load(table + r // PAGE, r < count, 0).to(tl.int64)
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def paged_rows_at(t, stride, row, page, start, count, N: tl.constexpr, PAGE: tl.constexpr):
    """`rows_at` of keys [start, start + N) in these pages of t."""
    r = start + tl.arange(0, N)[:, None]
    return t + page * stride + (r % PAGE).to(tl.int64) * row, r < count


@triton.jit
def load_at(rows, WIDTH: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """`load_rows` from pointers [R, 1] and their mask."""
    d = tl.arange(0, D)[None, :]
    if EDGE:
        return tl.load(rows[0] + d, rows[1] & (d < WIDTH), 0)
    elif WIDTH == D:
        return tl.load(rows[0] + d)
    else:
        return tl.load(rows[0] + d, d < WIDTH, 0)


@triton.jit
def product(a, b):
    """a b in float32; float32 inputs use the cores that round like eager's."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def row_products(a, a_at, b, b_at, WIDTH: tl.constexpr):
    """a b^T in float32. a_at, b_at: pointers [R, 1] to the rows of each, and masks.

    In float32 both operands are loaded from memory again, a piece of the width at a time: the
    float32 dot keeps all operands of a product in registers.
    """
    if a.dtype == tl.float32:
        x = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
        for c in tl.range(0, WIDTH, PIECE, num_stages=1):
            d = c + tl.arange(0, PIECE)[None, :]
            of_a = tl.load(a_at[0] + d, a_at[1] & (d < WIDTH), 0)
            of_b = tl.load(b_at[0] + d, b_at[1] & (d < WIDTH), 0)
            x += product(of_a, tl.trans(of_b))
        return x
    else:
        return product(a, tl.trans(b))


@triton.jit
def curved(x, curve, MAP: tl.constexpr):
    """The scores of products x, before a bias.

    curve: (scale / softcap, softcap), (scale, 0), or (scale log2 e, 0) for MAP "folded", which
    leaves products for `exponentials` to scale; the other maps apply the formula. The third element
    is None, or 1 in float32, whose functions must be as accurate as eager's. A bool would become an
    `if` in the machine code.
    """
    inner, softcap, exact = curve
    if MAP == "capped":
        return tanh(x * inner, exact is not None) * softcap
    elif MAP == "scaled":
        return x * inner
    else:
        return x


@triton.jit
def masked(s, bias, bias_key, i, j, window, n_k, EDGE: tl.constexpr):
    """Scores with their bias, -infinity where not visible.

    bias: pointers to the start of each query's bias. Away from the edges, only a bias hides keys.
    """
    if EDGE:
        seen = sees(i, j, window, n_k)
    if bias is not None:
        at = bias + j.to(tl.int64) * bias_key
        added = tl.load(at, seen, 0) if EDGE else tl.load(at)
        if bias.dtype.element_ty == tl.int1:
            s = tl.where(added, s, float("-inf"))
        else:
            s += added.to(tl.float32)
    if EDGE:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def exponentials(x, max_score, curve, MAP: tl.constexpr):
    """exp(score - max_score).

    A folded `max_score` is in powers of 2, which makes this one operation before exp2. A score near
    the least float32 would overflow there; only a bias can produce one.
    """
    if MAP == "folded":
        return tl.exp2(x * (curve[0]) - max_score)
    else:
        return exponential(x - max_score, MAP, curve[2] is not None)


@triton.jit
def move(max_score, x, curve, MAP: tl.constexpr):
    """Extends the softmax to scores x, [M, N].

    Returns the largest score so far, [M, 1], and the factor for the sums so far. A NaN shows up in
    the exponentials.
    """
    found = tl.max(x, 1, keep_dims=True)
    if MAP == "folded":
        found *= curve[0]
    new = tl.maximum(max_score, found)
    return new, exponential(max_score - new, MAP, curve[2] is not None)


@triton.jit
def exponential(difference, MAP: tl.constexpr, EXACT: tl.constexpr):
    """exp of the difference between two `max_score`, or between a score and one."""
    if MAP == "folded":
        return tl.exp2(difference)
    elif EXACT:
        return exact_exp(difference)
    else:
        return tl.exp2(difference * LOG2E)


@triton.jit
def denominator(max_score, total, sink, MAP: tl.constexpr):
    """The factor that turns exp(score - max_score) into a probability, and lse in two parts.

    The parts are a base and a logarithm, float64. A row that sees nothing has a factor of 0 and,
    without a sink, an lse of -infinity.
    """
    base, whole = max_score.to(tl.float64), total.to(tl.float64)
    if MAP == "folded":
        base /= LOG2E
    share = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    if sink is not None:
        origin = tl.maximum(base, sink)
        of_keys = tl.exp(base - origin)
        whole = whole * of_keys + tl.exp(sink - origin)
        base = origin
        share = tl.where(total == 0, 0.0, of_keys / whole).to(tl.float32)
    logarithm = tl.log(tl.where(whole == 0, 1.0, whole))
    return share, tl.where(whole == 0, float("-inf"), base + logarithm)


@triton.jit
def kept(drop, row, start, M: tl.constexpr, N: tl.constexpr):
    """The dropout's factor for each probability, [M, N]: 0 or its scale.

    row: [M, 1] int64, as the operator numbers rows. start: the first key's index among all keys, a
    multiple of 4.
    """
    seed, threshold, scale = drop
    return dropout(tl.full([M, N], 1.0, tl.float32), seed, threshold, scale, row, start, N)


@triton.jit
def slope(s, curve):
    """d softcap tanh(a / softcap) / da, for a score before its bias."""
    bent = s / curve[1]
    return 1 - bent * bent


@triton.jit
def score_gradients(p, dp, delta, of_lse):
    """Gradients of scores with their bias. delta: the sum of p dp; of_lse: lse's gradient or None.

    Computed in two steps: where one key has all of p, dp minus the sum is then exactly 0, without
    rounding.
    """
    d = dp - delta
    if of_lse is not None:
        d += of_lse
    return p * d
