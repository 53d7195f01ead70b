"""Shared helpers for rotary tests: arguments, backends, comparison."""

import torch

from fusedops.functional import rotary_embedding
from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import backends, check, device_of, placed

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [name for name in backends("rotary_embedding") if name != "reference"]
LAYOUTS = [False, True]  # interleaved


def inputs(heads, seq, width, rotary=None, dtype=torch.float32, *, batch=2, table=None):
    """q [batch, heads[0], seq, width], k [batch, heads[1], seq, width], cos and sin.

    The pairs' two angles differ, as those of Qwen2-VL do.
    """
    draw = torch.Generator().manual_seed(len(heads) + seq + width)
    q, k = (torch.randn(batch, h, seq, width, generator=draw).to(dtype) for h in heads)
    angle = torch.randn(batch, seq, width if rotary is None else rotary, generator=draw) * 4
    return q, k, angle.cos().to(table or dtype), angle.sin().to(table or dtype)


def with_table(run, cos, sin, **options):
    """`run` of q and k alone."""
    return lambda q, k: run(q, k, cos, sin, **options)


def compare(backend, args, **options):
    """By the yardstick, with the gradients of q and k."""
    q, k, *table = args
    table = placed(table, device_of(backend))
    check(
        with_table(rotary_embedding, *table, **options),
        with_table(rotary_embedding_reference, *table, **options),
        (q, k),
        backend,
    )
