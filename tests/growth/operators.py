"""Public functions as growth subjects, named by function and variant."""

import functools
from collections.abc import Callable

import torch

import fusedops
from fusedops import functional as F
from growth.subject import BF16, F32, Subject, fixed, leaf, numbers

ROWS, N = 16, 64
NO_DOUBLE_BACKWARD = {"double backward": "grad_in_forward keeps no logits for it"}


def attention(*, heads: int = 4, kv_heads: int = 4, queries: int = 16, dtype=F32, **how):
    """`how` holds attention's arguments; a callable draws a fresh tensor at each call."""
    drawn = {name: how.pop(name) for name in tuple(how) if callable(how[name])}

    def run(q, k, v, *more):
        return F.attention(q, k, v, **dict(zip(drawn, more, strict=True)), **how)

    def inputs():
        q = leaf(1, heads, queries, 16, dtype=dtype)
        k, v = (leaf(1, kv_heads, 16, 16, dtype=dtype) for _ in range(2))
        return [q, k, v, *(draw() for draw in drawn.values())]

    return Subject(run, inputs)


def varlen():
    def run(q, k, v, cu_seqlens):
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        return F.attention(q, k, v, causal=True, return_lse=True, **lengths)

    def inputs():
        cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        return [leaf(14, 4, 16), leaf(14, 2, 16), leaf(14, 2, 16), cu_seqlens]

    return Subject(run, inputs)


def sdpa(mask: Callable | None = None, kv_heads: int = 4, **how):
    def run(*tensors):
        return F.scaled_dot_product_attention(*tensors, **how)

    def inputs():
        qkv = [leaf(1, 4, 16, 16), leaf(1, kv_heads, 16, 16), leaf(1, kv_heads, 16, 16)]
        return qkv if mask is None else [*qkv, mask()]

    return Subject(run, inputs)


def cross_entropy(*, dtype=F32, loss_dtype=None, weight: bool = False, left=None, **how):
    def run(logits, target, *rest):
        return F.cross_entropy(logits, target, *rest, dtype=loss_dtype, **how)

    def inputs():
        given = [leaf(ROWS, N, dtype=dtype), numbers(ROWS, below=N)]
        return [*given, fixed(N).abs()] if weight else given

    return Subject(run, inputs, left=left or {})


def probabilities():
    def inputs():
        return [leaf(ROWS, N), fixed(ROWS, N).softmax(-1)]

    return Subject(F.cross_entropy, inputs)


def linear_cross_entropy(*, dtype=F32, frozen: bool = False, bias=False, weight=False, **how):
    names = [name for name, there in {"linear_bias": bias, "weight": weight}.items() if there]

    def run(x, linear_weight, target, *rest):
        more = dict(zip(names, rest, strict=True))
        return F.linear_cross_entropy(x, linear_weight, target, **more, **how)

    def inputs():
        head = fixed(N, 32, dtype=dtype) if frozen else leaf(N, 32, dtype=dtype)
        given = [leaf(ROWS, 32, dtype=dtype), head, numbers(ROWS, below=N)]
        given += [leaf(N, dtype=dtype)] if bias else []
        return [*given, fixed(N).abs()] if weight else given

    return Subject(run, inputs)


LONG_TO_COMPILE = {"compiled": "Inductor compiles the search for scales in half a minute"}


def quantized_linear(format: str, dtype=F32, group_size: int | None = None, **how):
    def run(x, bias, qweight, scales, zeros=None):
        size = of_codes.group_size
        weight = F.QuantizedWeight(format, 32, N, size, qweight, scales, zeros)
        return F.quantized_linear(x, weight, bias, **how)

    def codes():
        return F.quantize_weight(fixed(32, N), format, group_size=group_size)

    def inputs():
        return [leaf(8, N, dtype=dtype), leaf(32, dtype=dtype), *codes().tensors().values()]

    of_codes = codes()
    return Subject(run, inputs, flexible=2)


def quantizing(format: str, left=None):
    """Quantizes and dequantizes. x, one number, has a gradient; codes have none."""

    def run(x, weight):
        q = F.quantize_weight(weight, format).to("cpu")
        return x * F.dequantize_weight(q)

    return Subject(run, lambda: [leaf(), fixed(32, N)], left=left or {})


def clipped():
    """Clips two gradients, each of which is a copy of an input."""

    def run(a, b):
        pair = [t.detach().requires_grad_() for t in (a, b)]
        for t, grad in zip(pair, (a, b), strict=True):
            t.grad = grad.detach().clone()
        return a.sum() * F.clip_grad_norm_(pair, 1.0)

    left = {
        "torch.func": "sets .grad, which no transform allows",
        "exception in operator": "takes gradients of any shape",
    }
    return Subject(run, lambda: [leaf(ROWS, N), leaf(N)], left=left)


def drawn(*shapes, dtype=F32):
    return lambda: [leaf(*shape, dtype=dtype) for shape in shapes]


def rotary(unsqueeze_dim=1, table=fixed, **how):
    def run(q, k, cos, sin):
        return F.rotary_embedding(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **how)

    q, k = ((1, 4, 8, 16), (1, 2, 8, 16)) if unsqueeze_dim == 1 else ((1, 8, 4, 16), (1, 8, 2, 16))
    return Subject(run, lambda: [leaf(*q), leaf(*k), table(1, 8, 16), table(1, 8, 16)])


def linear(activation):
    """The kernel also runs where torch's own lines are faster."""

    def run(x, weight, bias):
        return F.linear(x, weight, bias, activation)

    around = functools.partial(fusedops.backend, "cpu")
    return Subject(run, drawn((8, N), (32, N), (32,)), around=around)


def norm(function, *shapes, dtype=F32, **how):
    return Subject(functools.partial(function, **how), drawn(*shapes, dtype=dtype))


X, ROW = (ROWS, N), (N,)
SHAPE = {"normalized_shape": ROW}
OPERATORS = {
    "layer_norm": lambda: Subject(
        lambda x, w, b: F.layer_norm(x, ROW, w, b), drawn(X, ROW, ROW)
    ),
    "rms_norm": lambda: Subject(lambda x, w: F.rms_norm(x, ROW, w), drawn(X, ROW)),
    "rms_norm, Gemma's": lambda: Subject(
        lambda x, w: F.rms_norm(x, ROW, w, 1e-6, rounding="llama", offset=1.0),
        drawn(X, ROW, dtype=BF16),
    ),
    "add_layer_norm": lambda: norm(F.add_layer_norm, X, X, ROW, ROW),
    "add_layer_norm, dropout": lambda: norm(F.add_layer_norm, X, X, ROW, ROW, dropout_p=0.1),
    "add_rms_norm": lambda: norm(F.add_rms_norm, X, X, ROW, dtype=BF16),
    "add_rms_norm, dropout": lambda: norm(F.add_rms_norm, X, X, ROW, dropout_p=0.1),
    "swiglu": lambda: norm(F.swiglu, X, X),
    "swiglu, packed": lambda: norm(F.swiglu, X, limit=7.0, alpha=1.702, up_offset=1.0),
    "geglu": lambda: norm(F.geglu, X, X),
    "geglu, packed": lambda: norm(F.geglu, X, approximate="tanh", dtype=BF16),
    "linear": lambda: linear(None),
    "linear, gelu": lambda: linear("gelu"),
    "linear, silu": lambda: linear("silu"),
    "quantized_linear, int8": lambda: quantized_linear("int8"),
    "quantized_linear, int8 by int8": lambda: quantized_linear("int8", input_format="int8"),
    "quantized_linear, int8 in groups": lambda: quantized_linear("int8", group_size=16),
    "quantized_linear, int4": lambda: quantized_linear("int4", activation="gelu"),
    "quantized_linear, nf4": lambda: quantized_linear("nf4", dtype=BF16),
    "quantized_linear, nf4 exact": lambda: quantized_linear("nf4", compute="exact"),
    "quantized_linear, fp8 by fp8": lambda: quantized_linear("fp8", input_format="fp8"),
    "quantize_weight, int4": lambda: quantizing("int4", LONG_TO_COMPILE),
    "quantize_weight, nf4": lambda: quantizing("nf4"),
    "dequantize_weight, int8": lambda: quantizing("int8"),
    "dequantize_weight, fp8": lambda: quantizing("fp8"),
    "QuantizedWeight": lambda: quantized_linear("int4", group_size=32),
    "rotary_embedding": lambda: rotary(),
    "rotary_embedding, interleaved": lambda: rotary(2, interleaved=True),
    "rotary_embedding, table with gradients": lambda: rotary(table=leaf),
    "cross_entropy": lambda: cross_entropy(),
    "cross_entropy, options": lambda: cross_entropy(
        dtype=BF16, weight=True, ignore_index=3, label_smoothing=0.1, z_loss=1e-3, softcap=30.0,
        scale=0.5, reduction="sum", loss_dtype=F32,
    ),
    "cross_entropy, each row's": lambda: cross_entropy(reduction="none"),
    "cross_entropy, grad_in_forward": lambda: cross_entropy(
        grad_in_forward=True, left=NO_DOUBLE_BACKWARD
    ),
    "cross_entropy, probabilities": probabilities,
    "linear_cross_entropy": lambda: linear_cross_entropy(),
    "linear_cross_entropy, bfloat16": lambda: linear_cross_entropy(dtype=BF16, bias=True),
    "linear_cross_entropy, frozen": lambda: linear_cross_entropy(dtype=BF16, frozen=True),
    "linear_cross_entropy, options": lambda: linear_cross_entropy(
        bias=True, weight=True, ignore_index=3, label_smoothing=0.1, z_loss=1e-3, softcap=30.0,
        scale=0.5, reduction="none",
    ),
    "attention": lambda: attention(),
    "attention, bfloat16 of grouped heads": lambda: attention(
        kv_heads=2, dtype=BF16, causal=True, return_lse=True
    ),
    "attention, a query": lambda: attention(kv_heads=2, queries=1),
    "attention, window and softcap": lambda: attention(window=(4, 0), softcap=20.0),
    "attention, sinks and bias": lambda: attention(
        sinks=lambda: leaf(4), bias=lambda: leaf(1, 4, 16, 16)
    ),
    "attention, mask": lambda: attention(bias=lambda: fixed(1, 1, 16, 16) > 0),
    "attention, dropout": lambda: attention(dropout_p=0.1),
    "attention, sequences": varlen,
    "scaled_dot_product_attention": lambda: sdpa(is_causal=True),
    "scaled_dot_product_attention, mask": lambda: sdpa(lambda: fixed(16, 16), dropout_p=0.1),
    "scaled_dot_product_attention, grouped": lambda: sdpa(kv_heads=2, enable_gqa=True),
    "clip_grad_norm_": clipped,
}  # fmt: skip
