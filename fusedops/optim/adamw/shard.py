"""DTensor support for AdamW: local parts, 256-element blocks within shards, and sums over ranks.

A sharded tensor's blocks restart with each slice of its first dimension. Any cut between two slices
is then a cut between two blocks, so states saved on any number of ranks load on any other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops.references.adamw import BLOCK

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

LEAST_ROW = 64  # elements per slice; below this, a scale would cost a tenth of its codes


def dtensor_class() -> type[DTensor] | None:
    """DTensor, if it has been imported: its module loads sympy, which takes 0.4 s."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    cls = dtensor_class()
    return cls is not None and isinstance(value, cls)


def local(t: Tensor) -> Tensor:
    """The part of t on this rank: t itself unless it is a DTensor."""
    return t.to_local() if is_dtensor(t) else t


def with_local(t: Tensor, part: Tensor) -> Tensor:
    """A tensor like t with another part on this rank."""
    if not is_dtensor(t):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor(part, t._spec, requires_grad=False)


def sharded_dims(p: Tensor) -> set[int]:
    """The sharded dimensions; -1 for a kind of sharding other than plain slices."""
    if not is_dtensor(p):
        return set()
    from torch.distributed.tensor import Shard

    cuts = (placement for placement in p.placements if not placement.is_replicate())
    return {cut.dim if type(cut) is Shard else -1 for cut in cuts}


def takes_codes(p: Tensor) -> bool:
    """Whether a parameter's moments can be 8-bit codes, however it will be sharded."""
    cut = sharded_dims(p)
    return not cut or (cut == {0} and p.shape[1:].numel() >= LEAST_ROW and p.dim() > 1)


def rows_of(p: Tensor) -> tuple[int, int]:
    """Elements per row of blocks (0: all), and the number of blocks on earlier ranks."""
    if not is_dtensor(p) or sharded_dims(p) != {0} or p.dim() < 2:
        return 0, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1]
    row = p.shape[1:].numel()
    return row, offset[0] * -(-row // BLOCK)


def scales_count(p: Tensor) -> int:
    """The number of blocks on this rank; each has one scale."""
    count = local(p).numel()
    row = rows_of(p)[0] or count
    return count // row * -(-row // BLOCK) if count else 0


def scales_shape(p: Tensor) -> tuple[int, ...]:
    """The global shape of the scales: one row per slice if rows are whole blocks."""
    row = p.shape[1:].numel() if p.dim() > 1 else 0
    if sharded_dims(p) or (row and row % BLOCK == 0):
        return (p.shape[0], -(-row // BLOCK))
    return (-(-p.numel() // BLOCK),)


def distributed(p: Tensor, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Wraps this rank's t as a DTensor of `shape`, sharded as p is."""
    if not is_dtensor(p):
        return t.reshape(shape)
    from torch.distributed.tensor import DTensor

    stride = (*[torch.Size(shape[i:]).numel() for i in range(1, len(shape))], 1)
    part = t.reshape(-1, *shape[1:]) if sharded_dims(p) else t.reshape(shape)
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def reduced(p: Tensor, t: Tensor) -> Tensor:
    """t summed over the ranks that hold other parts of p."""
    if is_dtensor(p):
        for dim, placement in enumerate(p.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(t, group=p.device_mesh.get_group(dim))
    return t
