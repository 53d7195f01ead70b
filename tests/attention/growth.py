"""attention's functions and modules for the memory-growth tests in tests/growth."""

from collections.abc import Callable

import torch
from growth.subject import BF16, F32, Subject, fixed, leaf, nn_module

from fusedops import functional as F
from fusedops import nn


def attention(*, heads: int = 4, kv_heads: int = 4, queries: int = 16, dtype=F32, **options):
    """Returns a subject with these options; callables among them draw a new tensor per call."""
    drawn = {name: options.pop(name) for name in tuple(options) if callable(options[name])}

    def run(q, k, v, *more):
        return F.attention(q, k, v, **dict(zip(drawn, more, strict=True)), **options)

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


def cached(paged: bool = True):
    """The pages' gradients are left out: then the kernel runs."""

    def run(q, k, v, seqused_k, *block_table):
        options = {"causal": True, "seqused_k": seqused_k}
        if not paged:
            return F.attention(q, k, v, **options)
        detached = (t.detach() for t in (q, k, v))
        return q * F.attention(*detached, block_table=block_table[0], **options)

    def inputs():
        used = torch.tensor([5, 12], dtype=torch.int32)
        if not paged:
            return [leaf(2, 4, 2, 16), leaf(2, 2, 16, 16), leaf(2, 2, 16, 16), used]
        table = torch.tensor([[1, 2, -1], [3, 0, 2]], dtype=torch.int32)
        return [leaf(2, 4, 2, 16), fixed(4, 4, 2, 16), fixed(4, 4, 2, 16), used, table]

    return Subject(run, inputs)


def sdpa(mask: Callable | None = None, kv_heads: int = 4, **options):
    def run(*tensors):
        return F.scaled_dot_product_attention(*tensors, **options)

    def inputs():
        qkv = [leaf(1, 4, 16, 16), leaf(1, kv_heads, 16, 16), leaf(1, kv_heads, 16, 16)]
        return qkv if mask is None else [*qkv, mask()]

    return Subject(run, inputs)


def merged():
    """Over two parts of the keys."""

    def run(q, k, v):
        parts = [
            F.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
            for at in (slice(0, 6), slice(6, 16))
        ]
        return F.merge_attention(*zip(*parts, strict=True))

    return Subject(run, lambda: [leaf(1, 4, 16, 16) for _ in range(3)])


def sequence():
    return [leaf(2, 8, 32)]


class SelfAttention(nn.MultiheadAttention):
    """MultiheadAttention with one input. weights: whether it returns attention weights."""

    weights = False

    def forward(self, x):
        return super().forward(x, x, x, need_weights=self.weights)


class WithWeights(SelfAttention):
    weights = True


OPERATORS = {
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
    "attention, cache": lambda: cached(paged=False),
    "attention, pages": cached,
    "merge_attention": merged,
    "scaled_dot_product_attention": lambda: sdpa(is_causal=True),
    "scaled_dot_product_attention, mask": lambda: sdpa(lambda: fixed(16, 16), dropout_p=0.1),
    "scaled_dot_product_attention, grouped": lambda: sdpa(kv_heads=2, enable_gqa=True),
}  # fmt: skip

MODULES = {
    "MultiheadAttention": lambda: nn_module(SelfAttention(32, 4, batch_first=True), sequence),
    "MultiheadAttention, sequence first": lambda: nn_module(
        SelfAttention(32, 4, dropout=0.1, add_bias_kv=True), sequence
    ),
    "MultiheadAttention, weights": lambda: nn_module(WithWeights(32, 4), sequence),
}
