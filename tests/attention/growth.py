"""attention's functions and modules for the memory-growth tests in tests/growth."""

import torch
from growth.subject import Subject, fixed, leaf, nn_module

from fusedops import functional as F
from fusedops import nn


def pages():
    """The pages' gradients are left out: then the kernel runs."""

    def run(q, k, v, seqused_k, block_table):
        detached = (t.detach() for t in (q, k, v))
        options = {"causal": True, "seqused_k": seqused_k, "block_table": block_table}
        return q * F.attention(*detached, **options)

    def inputs():
        used = torch.tensor([5, 12], dtype=torch.int32)
        table = torch.tensor([[1, 2, -1], [3, 0, 2]], dtype=torch.int32)
        return [leaf(2, 4, 2, 16), fixed(4, 4, 2, 16), fixed(4, 4, 2, 16), used, table]

    return Subject(run, inputs)


def sdpa():
    """With a mask, dropout and grouped heads."""
    options = {"dropout_p": 0.1, "enable_gqa": True}

    def run(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    def inputs():
        return [leaf(1, 4, 16, 16), leaf(1, 2, 16, 16), leaf(1, 2, 16, 16), fixed(16, 16)]

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
    "attention, pages without gradients": pages,
    "merge_attention": merged,
    "scaled_dot_product_attention": sdpa,
}

MODULES = {
    "MultiheadAttention": lambda: nn_module(SelfAttention(32, 4, batch_first=True), sequence),
    "MultiheadAttention, sequence first": lambda: nn_module(
        SelfAttention(32, 4, dropout=0.1, add_bias_kv=True), sequence
    ),
    "MultiheadAttention, weights": lambda: nn_module(WithWeights(32, 4), sequence),
}
