"""The definitions of LayerNorm, RMSNorm, their residual-sum variants, and dropout's masks.

Plain PyTorch in the input's dtype, exact for float64 inputs.
"""

import math

import torch
import torch.nn.functional as F

from fusedops.references.quantized_rows import quantized_rows_reference


def layer_norm_reference(input, normalized_shape, weight=None, bias=None, eps=1e-5, dtype=None):
    axes = tuple(range(-len(normalized_shape), 0))
    acc = _accumulate(input)
    var, mean = torch.var_mean(acc, axes, correction=0, keepdim=True)
    y = (acc - mean) * (var + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype or input.dtype)


def rms_norm_reference(
    input, normalized_shape, weight=None, eps=None, *, rounding="torch", offset=0.0, dtype=None,
    output_format=None,
):  # fmt: skip
    axes = tuple(range(-len(normalized_shape), 0))
    acc, dtype = _accumulate(input), dtype or input.dtype
    eps = torch.finfo(acc.dtype).eps if eps is None else eps
    n = acc * (acc.square().mean(axes, keepdim=True) + eps).rsqrt()
    if output_format is not None:
        n = n.to(dtype).to(acc.dtype) if rounding == "llama" else n
        y = n if weight is None else n * (offset + weight.to(acc.dtype))
        return quantized_rows_reference(y, output_format)
    if weight is None:
        return n.to(dtype)
    scale = weight if offset == 0 else offset + _accumulate(weight)
    if rounding == "llama":
        return (scale * n.to(dtype)).to(torch.promote_types(dtype, weight.dtype))
    return (n * scale).to(dtype)


def add_layer_norm_reference(x, residual, weight=None, bias=None, eps=1e-5, *, dropout_p=0.0):
    shape = x.shape[-1:] if weight is None else weight.shape
    h = residual + dropout_reference(x, dropout_p, len(shape))
    return layer_norm_reference(h, shape, weight, bias, eps, _stream_dtype(x, h, weight)), h


def add_rms_norm_reference(
    x, residual, weight=None, eps=1e-6, *, rounding="llama", offset=0.0, dropout_p=0.0,
    output_format=None,
):  # fmt: skip
    shape = x.shape[-1:] if weight is None else weight.shape
    h = residual + dropout_reference(x, dropout_p, len(shape))
    dtype = _stream_dtype(x, h, weight)
    options = {"rounding": rounding, "offset": offset, "output_format": output_format}
    return rms_norm_reference(h, shape, weight, eps, dtype=dtype, **options), h


def norm_reference(
    x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed, output_format=None
):  # fmt: skip
    """The operators' form of the four: y and h. kind: "layer", "rms" or "rms_llama".

    "layer" calls torch's function where that takes the tensors, all in float64, so that its results
    equal torch's to the bit.
    """
    h = x if residual is None else residual + dropout_reference(x, dropout_p, dims, seed)
    shape, dtype = h.shape[h.dim() - dims :], _stream_dtype(x, h, weight)
    stream = None if residual is None else h
    dtypes = {t.dtype for t in (x, residual, weight, bias) if t is not None}
    if kind == "layer" and dtypes == {torch.float64} and not dropout_p:
        return F.layer_norm(h, shape, weight, bias, eps), stream
    if kind == "layer":
        return layer_norm_reference(h, shape, weight, bias, eps, dtype), stream
    options = {"rounding": "llama" if kind == "rms_llama" else "torch", "offset": offset}
    options |= {"dtype": dtype, "output_format": output_format}
    return rms_norm_reference(h, shape, weight, eps, **options), stream


def norm_quantized_reference(*args):
    (codes, scale), h = norm_reference(*args)
    return codes, scale, h


def rms_norm_quantized_reference(*args, output_format="int8", **options):
    return rms_norm_reference(*args, output_format=output_format, **options)


def add_rms_norm_quantized_reference(*args, output_format="int8", **options):
    (codes, scale), h = add_rms_norm_reference(*args, output_format=output_format, **options)
    return codes, scale, h


def dropout_reference(x, p, dims=1, seed=None):
    """x with a fraction p of its elements dropped, by the mask that every kernel draws.

    Philox4x32-7 (Salmon et al., SC 2011), keyed by a 64-bit seed. Element [row, col] has the
    counter (col // 4, low half of row, high half of row, 0). Word col % 4 of the output keeps the
    element if it is at least p * 2^32. A row is the last `dims` dimensions.
    """
    if p == 0:
        return x
    if torch.compiler.is_dynamo_compiling():  # only without the compiled part
        return F.dropout(x, p)
    if seed is None:
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    rows, n = math.prod(x.shape[:-dims]), math.prod(x.shape[-dims:])
    mask = dropout_mask_reference
    if torch._C._len_torch_dispatch_stack() > 0:  # Inductor miscompiles wrapping products
        mask = getattr(torch.ops.fusedops, "dropout_mask", mask)
    return x * mask(seed, rows, n, p).reshape(x.shape) * (0.0 if p == 1 else 1 / (1 - p))


def dropout_mask_reference(seed, rows, n, p):
    """[rows, n] bool: which elements are kept."""
    row = torch.arange(rows, device=seed.device)[:, None]
    zero = torch.zeros(rows, -(-n // 4), dtype=torch.int64, device=seed.device)
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = zero + torch.arange(zero.shape[1], device=seed.device), zero + row, zero, zero
    c1, c2 = c1 & low, c2 + (row >> 32)
    k0, k1 = seed & low, seed >> 32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the low 64 bits; the sign does not matter
        c0, c1, c2, c3 = p1 >> 32 & low ^ c1 ^ k0, p1 & low, p0 >> 32 & low ^ c3 ^ k1, p0 & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    word = torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :n]
    return word >= min(int(p * 2**32), low)


def _accumulate(t):
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _stream_dtype(x, h, weight):
    """y's dtype: h's if the weight has it too, else x's (h is a float32 residual stream)."""
    return h.dtype if weight is not None and weight.dtype == h.dtype else x.dtype
