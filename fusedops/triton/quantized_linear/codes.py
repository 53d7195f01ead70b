"""Codes in a tile, and the numbers that they are.

A tile is N rows of the weight by K columns. Its FORM says how codes lie there:

    whole   a code a byte: tiles of bytes and of numbers are alike
    halves  two codes a byte, and each row begins with a byte: the tile is [N, K / 2] bytes, whose
            high halves are the even columns and whose low halves are the odd ones. Nothing ever
            interleaves them: what they are multiplied by is split instead
    flat    two codes a byte, and a row may begin within one (nf4 of odd rows): a byte for each code

and its SCALE where the scales are: of a "row", which the sums or the other operand take; one for
each row of the "tile"; or any, of "each" number.
"""

import os

import triton
import triton.language as tl

# Its own conversion to bfloat16 truncates.
INTERPRETING = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NF4_BLOCK = tl.constexpr(64)


@triton.jit
def load_codes(w, row, start, FORM: tl.constexpr, K: tl.constexpr):
    """The bytes of columns [start, start + K) of rows `row`, [N, 1] int64; int32."""
    codes, _, _, _, rows, k, row_bytes, _, _ = w
    if FORM == "halves":
        col = start // 2 + tl.arange(0, K // 2)[None, :]
        at, live = row * row_bytes + col, (row < rows) & (col < row_bytes)
    else:
        col = start + tl.arange(0, K)[None, :]
        at, live = row * k + col, (row < rows) & (col < k)
        if FORM == "flat":
            at = at >> 1
    return tl.load(codes + at, live, 0)


@triton.jit
def low_halves(w, row, start, K: tl.constexpr):
    """Of a flat tile: whether a code is the low half of its byte, [N, K]."""
    return (row * w[5] + start + tl.arange(0, K)[None, :]) & 1 == 1


@triton.jit
def load_scales(
    w,
    row,
    start,
    FORMAT: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
):
    """The scales of a tile and, of int4, its zeros as float32: [N, 1], or one for each byte. Of
    others there are no zeros, and the second is not used."""
    _, scales, zeros, _, rows, k, _, groups, group_size = w
    if SCALE == "each":
        if FORM == "halves":  # both codes of a byte are of one group
            col = start + 2 * tl.arange(0, K // 2)[None, :]
        else:
            col = start + tl.arange(0, K)[None, :]
    else:
        col = start + tl.zeros([1, 1], tl.int32)
    at = (row * k + col) // NF4_BLOCK if FORMAT == "table" else row * groups + col // group_size
    live = (row < rows) & (col < k)
    scale = tl.load(scales + at, live, 0)
    if zeros is None:
        return scale, scale
    else:
        return scale, tl.load(zeros + at, live, 0).to(tl.float32)


@triton.jit
def numbers(q, zero, table, FORMAT: tl.constexpr):
    """What codes stand for before their scale, float32. Integers become floats by their bits, in
    which 2^23 makes the last one count ones: a conversion takes four times as long."""
    q = q.to(tl.int32)
    if FORMAT == "signed":
        return _counted((q & 255) ^ 128) - 8388736.0
    elif FORMAT == "offset":
        return _counted(q) - (8388608.0 + zero)
    elif FORMAT == "table":
        return tl.load(table + q)
    else:  # float8_e4m3fn, whose exponent is a float16's but for 2^8; no GPU before sm_89 has it
        half = (((q & 127) << 7) | ((q & 128) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where((q & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _counted(q):
    return (q | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def weight(q, scale, zero, table, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """The weight of a tile's codes, float32: without the scale of a whole row."""
    w = numbers(q, zero, table, FORMAT)
    if SCALE != "row":
        w *= scale
    return w


@triton.jit
def operand(t, OPERAND: tl.constexpr):
    """What a product takes."""
    if OPERAND == "narrow":
        return rounded(t.to(tl.float32)) if INTERPRETING else t.to(tl.bfloat16)
    else:
        return t.to(tl.float32)


@triton.jit
def rounded(t):
    """float32 with a bfloat16's digits, half to even: a product of these is one of bfloat16."""
    bits = t.to(tl.int32, bitcast=True)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(t == t, up.to(tl.float32, bitcast=True), t)


@triton.jit
def stored(t, like):
    """t as the dtype that pointer `like` leads to."""
    if INTERPRETING and like.dtype.element_ty == tl.bfloat16:
        t = rounded(t)
    return t.to(like.dtype.element_ty)


@triton.jit
def product(a, b, sums):
    """sums + a b: float32 numbers on the cores that round as eager's do."""
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)
