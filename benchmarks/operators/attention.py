"""Attention benchmarks against torch's scaled_dot_product_attention and torch.compile.

Compute-bound: the figures that matter are the ratio, and FLOP/s over the visible pairs of query and
key. A decode step is memory-bound: its figure is the fraction of copy bandwidth. A shape is batch,
query heads, key heads, queries, keys and head width.
"""

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
    Case,
    Contender,
    Operation,
    calling,
    compiled,
    gpu_row,
)
from benchmarks.harness.goals import Goal
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

    sdpa = calling(torchs)
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


F32, BF16, SDPA = torch.float32, torch.bfloat16, "sdpa"
BERT, LLAMA, STEP, PAGES = (
    (1, 12, 12, 2048, 2048, 64),
    (1, 8, 8, 4096, 4096, 128),
    (1, 32, 8, 1, 4096, 128),
    (8, 32, 8, 1, 4096, 128),
)

MUST_SHOW = [
    *(Goal(FULL, FORWARD, BF16, shape, SDPA, {"default": 4.2}) for shape in (BERT, LLAMA)),
    *(Goal(CAUSAL, FORWARD, BF16, shape, SDPA, {"default": 4.8}) for shape in (BERT, LLAMA)),
    *(Goal(FULL, FORWARD, F32, shape, SDPA, {"default": 1.3}) for shape in (BERT, LLAMA)),
    Goal(CAUSAL, TRAINING, BF16, BERT, SDPA, {"default": 3.5}),
    Goal(DECODE, FORWARD, BF16, STEP, SDPA, {"default": 30.0}),
]
ROWS = [goal.case() for goal in MUST_SHOW] + [
    Case(CAUSAL, FORWARD, F32, BERT),
    Case(CAUSAL, TRAINING, F32, BERT),
    Case(DECODE, FORWARD, F32, STEP),
    Case(DECODE, FORWARD, BF16, (8, 32, 8, 1, 512, 128)),
    *(Case(PAGED, FORWARD, dtype, PAGES) for dtype in (BF16, F32)),
]
QUICK_ROWS = [
    Case(CAUSAL, FORWARD, BF16, (1, 4, 2, 256, 256, 64)),
    Case(DECODE, FORWARD, BF16, (1, 8, 2, 1, 512, 64)),
    Case(PAGED, FORWARD, BF16, (2, 8, 2, 1, 512, 64)),
]


# Small-batch calls.


def token_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """That many tokens of one head of this width."""
    tokens, width = shape
    return heads((1, 1, 1, tokens, tokens, width), dtype, device)


LAUNCH = [
    replace(
        FULL,
        inputs=token_inputs,
        contenders={
            "eager": calling(F.scaled_dot_product_attention),
            "fusedops functional": calling(getattr(ours, name)),
        },
        name=name,
    )
    for name in ("scaled_dot_product_attention", "attention")
]


# Rows on a GPU, in bfloat16.

HEADS = 16
LENGTHS = (1024, 2048, 4096, 8192)
DECODE_SHAPE = (32, 32, 8, 1, 4096, 128)


def long_shape(tokens: int) -> tuple[int, ...]:
    return (16384 // tokens, HEADS, HEADS, tokens, tokens, 128)


GPU_ROWS = [
    *(
        gpu_row(CAUSAL, mode, long_shape(tokens), "device")
        for mode in (FORWARD, BACKWARD, TRAINING)
        for tokens in LENGTHS
    ),
    gpu_row(DECODE, FORWARD, DECODE_SHAPE, "device"),
    gpu_row(FULL, FORWARD, long_shape(4096), "device"),
]
