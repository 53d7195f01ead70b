"""Attention's benchmarked operations and contenders: torch, torch.compile and fusedops."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Contender,
    Operation,
    compiled,
)
from fusedops.references.attention import attention_reference, cached_attention_reference


def heads(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k and v as projections produce them: views of [batch, tokens, heads, width]."""
    batch, q_heads, kv_heads, queries, keys, width = shape

    def made(tokens: int, count: int) -> Tensor:
        x = torch.randn(batch, tokens, count, width, dtype=dtype, device=device)
        return x.transpose(1, 2).requires_grad_()

    return made(queries, q_heads), made(keys, kv_heads), made(keys, kv_heads)


def cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Returns a generation step's q with a cache: [batch, heads, tokens, width]."""
    return tuple(t.detach().contiguous().requires_grad_() for t in heads(shape, dtype, device))


def traffic(mode: str, q: Tensor, k: Tensor, v: Tensor) -> int:
    """q, k, v and out once; in backward, these and their gradients."""
    once = 2 * q.nbytes + k.nbytes + v.nbytes
    return {FORWARD: once, BACKWARD: 2 * once, TRAINING: 3 * once}[mode]


def by_heads(t: Tensor) -> Tensor:
    """Returns the result with one row per head, as in the tests.

    Among 32768 rows of one query each, eager's own error is sometimes almost zero by chance.
    """
    return t.flatten(-2)


def flops(share: float, mode: str, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Counts two matmuls forward and five backward, over the visible pairs."""
    products = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}[mode]
    return int(share * products * 2 * q.numel() * k.shape[2])


def operation(name: str, causal: bool = False, inputs: Callable = heads) -> Operation:
    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    sdpa = Contender(lambda *qkv: partial(torchs, *qkv))
    fused = Contender(lambda *qkv: partial(ours.attention, *qkv, causal=causal))
    return Operation(
        name,
        inputs,
        lambda *qkv: attention_reference(*qkv, causal=causal)[0],
        traffic,
        {"sdpa": sdpa, "compile(sdpa)": compiled(sdpa), "fusedops": fused},
        partial(flops, 0.5 if causal else 1.0),
        by_heads,
    )


FULL = operation("attention")
CAUSAL = operation("attention causal", causal=True)
DECODE = operation("attention decode", inputs=cache)


BLOCK = 16  # keys per block of a paged cache


def pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, a cache in blocks in random order, its table and lengths, and k and v in order."""
    q, k, v = (t.detach() for t in cache(shape, dtype, device))
    batch, heads, keys, width = k.shape
    each = keys // BLOCK
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0)).to(device)

    def stored(t: Tensor) -> Tensor:
        blocks = t.view(batch, heads, each, BLOCK, width).permute(0, 2, 3, 1, 4).flatten(0, 1)
        return blocks.new_empty(blocks.shape).index_copy_(0, order, blocks)

    used = torch.full((batch,), keys, dtype=torch.int32, device=device)
    return q, stored(k), stored(v), order.view(batch, each).int(), used, k, v


def gather_and_sdpa(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
    k, v = (t[table].flatten(1, 2).transpose(1, 2) for t in (k, v))
    seen = (torch.arange(k.shape[2], device=k.device) < used[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


def paged_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
    return ours.attention(q, k, v, block_table=table, seqused_k=used)


def paged_reference(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor, *_: Tensor):
    return cached_attention_reference(q, k, v, used, block_table=table)[0]


PAGED = Operation(
    "attention paged decode",
    pages,
    paged_reference,
    lambda mode, q, k, v, table, *_: 2 * q.nbytes + k.nbytes + v.nbytes + table.nbytes,
    {
        "gather + sdpa": Contender(lambda *inputs: partial(gather_and_sdpa, *inputs[:5])),
        "dense": Contender(lambda q, *inputs: partial(ours.attention, q, *inputs[4:])),
        "fusedops": Contender(lambda *inputs: partial(paged_attention, *inputs[:5])),
    },
    lambda mode, q, k, v, table, *_: 4 * q.numel() * table.shape[1] * BLOCK,
    by_heads,
)


def of_tokens(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """That many tokens of one head of this width."""
    tokens, width = shape
    return heads((1, 1, 1, tokens, tokens, width), dtype, device)


def call(function: Callable) -> Contender:
    return Contender(lambda *qkv: partial(function, *qkv))


LAUNCH = [
    replace(
        FULL,
        inputs=of_tokens,
        contenders={
            "eager": call(F.scaled_dot_product_attention),
            "fusedops functional": call(getattr(ours, name)),
        },
        name=name,
    )
    for name in ("scaled_dot_product_attention", "attention")
]
