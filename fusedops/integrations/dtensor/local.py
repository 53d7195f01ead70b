"""Helpers of the DTensor handlers: local parts, reductions over a mesh, results as DTensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "arguments",
    "leaves_a_rank_empty",
    "local",
    "local_range",
    "mesh_of",
    "placements_over",
    "reduced",
    "sharded_over",
    "to_dtensor",
]


def arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """An operator call's arguments by name."""
    return dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs


def mesh_of(values: Iterable[Any]) -> DeviceMesh:
    return next(value.device_mesh for value in values if isinstance(value, DTensor))


def local(t: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """This rank's part of t, redistributed. A plain tensor must be the same on every rank."""
    if not isinstance(t, Tensor):
        return t
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return t.redistribute(mesh, placements).to_local()


def to_dtensor(
    t: Any, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Any:
    """The DTensor with this shape whose part on this rank is t; None for None."""
    if t is None:
        return None
    strides = torch.empty(shape, dtype=t.dtype, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, t.dtype)
    return DTensor(t, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def reduced(t: Tensor, mesh: DeviceMesh, dims: Iterable[int], by: str = "sum") -> Tensor:
    """t, reduced over these dimensions of the mesh."""
    for dim in dims:
        t = collectives.wait_tensor(collectives.all_reduce(t, by, (mesh, dim)))
    return t


def sharded_over(t: Any, dim: int) -> list[int]:
    """The mesh's dimensions over which a dimension of t is sharded, in plain slices."""
    placements = t.placements if isinstance(t, DTensor) else ()
    return [i for i, p in enumerate(placements) if type(p) is Shard and p.dim == dim]


def placements_over(mesh: DeviceMesh, sharded: Mapping[int, Placement]) -> list[Placement]:
    """A placement for each of the mesh's dimensions; replicated over those not named."""
    return [sharded.get(dim, Replicate()) for dim in range(mesh.ndim)]


def local_range(
    shape: Sequence[int], dim: int, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, int]:
    """(offset, length) of this rank's part of a dimension, under these placements.

    In plain integers: torch's own function makes a tensor, which torch.compile cannot read.
    """
    offset, length = 0, shape[dim]
    for mesh_dim, placement in enumerate(placements):
        if placement == Shard(dim):
            part = -(-length // mesh.size(mesh_dim))
            before = min(part * mesh.get_local_rank(mesh_dim), length)
            offset, length = offset + before, min(part, length - before)
    return offset, length


def leaves_a_rank_empty(t: DTensor, dim: int, mesh_dims: Iterable[int]) -> bool:
    """Whether a rank has nothing of a dimension that is sharded over these of the mesh's."""
    shortest = t.shape[dim]
    for mesh_dim in mesh_dims:  # the last rank has what the others' equal parts leave
        ranks = t.device_mesh.size(mesh_dim)
        shortest -= -(-shortest // ranks) * (ranks - 1)
    return shortest <= 0
