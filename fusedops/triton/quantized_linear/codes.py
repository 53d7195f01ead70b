"""Triton quantized_linear: loads a tile's codes and dequantizes them.

A tile is N rows of the weight by K columns. FORM says how its codes are stored:

    whole   one code per byte: tiles of bytes and of numbers have the same shape
    halves  two codes per byte, and each row begins with a byte: the tile is [N, K / 2] bytes, whose
            high halves are the even columns and low halves the odd ones. They are never
            interleaved: the other operand is split instead
    flat    two codes per byte, and a row may begin within one (nf4 with odd rows): one byte is
            loaded per code

SCALE says how the scales are laid out: "row" (one per row, applied to the sums or the other
operand), "tile" (one per row of the tile), or "each" (any, loaded per element).
"""

import os

import triton
import triton.language as tl

# Triton's own conversion to bfloat16 truncates.
INTERPRETING = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
NF4_BLOCK = tl.constexpr(64)


@triton.jit
def load_codes(w, row, start, FORM: tl.constexpr, K: tl.constexpr):
    """The bytes of columns [start, start + K) of rows `row`, [N, 1] int64; as int32."""
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
    """For a flat tile: whether a code is the low half of its byte, [N, K]."""
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
    """A tile's scales and int4 zeros as float32: [N, 1], or one per byte.

    Other formats have no zeros, and the second result is not used.
    """
    _, scales, zeros, _, rows, k, _, groups, group_size = w
    if SCALE == "each":
        if FORM == "halves":  # both codes of a byte are in one group
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
    """The codes' values before scaling, float32.

    Integers become floats bitwise, by adding 2^23: a conversion instruction takes four times as
    long.
    """
    q = q.to(tl.int32)
    if FORMAT == "signed":
        return _counted((q & 255) ^ 128) - 8388736.0
    elif FORMAT == "offset":
        return _counted(q) - (8388608.0 + zero)
    elif FORMAT == "table":
        return tl.load(table + q)
    else:  # float8_e4m3fn: a float16 exponent off by 2^8; GPUs before sm_89 lack the type
        half = (((q & 127) << 7) | ((q & 128) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where((q & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _counted(q):
    return (q | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def weight(q, scale, zero, table, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """A tile's dequantized weight, float32, without per-row scales."""
    w = numbers(q, zero, table, FORMAT)
    if SCALE != "row":
        w *= scale
    return w


@triton.jit
def operand(t, OPERAND: tl.constexpr):
    """The values as the matmul's operand."""
    if OPERAND == "narrow":
        return rounded(t.to(tl.float32)) if INTERPRETING else t.to(tl.bfloat16)
    else:
        return t.to(tl.float32)


@triton.jit
def rounded(t):
    """float32 rounded half-to-even to bfloat16's digits: multiplies exactly like bfloat16."""
    bits = t.to(tl.int32, bitcast=True)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(t == t, up.to(tl.float32, bitcast=True), t)


@triton.jit
def stored(t, like):
    """t in the dtype that pointer `like` points to."""
    if INTERPRETING and like.dtype.element_ty == tl.bfloat16:
        t = rounded(t)
    return t.to(like.dtype.element_ty)


@triton.jit
def product(a, b, sums):
    """sums + a b; float32 inputs use the cores that round like eager's."""
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)
