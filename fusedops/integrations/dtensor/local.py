"""Local parts of DTensors, reductions over a mesh, and DTensors of results: for handlers."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["arguments", "local", "mesh_of", "offset_of", "reduced", "whole"]


def arguments(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """An operator call's arguments by name."""
    return dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs


def mesh_of(values: Iterable[Any]) -> DeviceMesh:
    return next(value.device_mesh for value in values if isinstance(value, DTensor))


def local(t: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """This rank's part of t, redistributed. A plain tensor is the same on every rank."""
    if not isinstance(t, Tensor):
        return t
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return t.redistribute(mesh, placements).to_local()


def whole(t: Any, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Any:
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


def offset_of(t: Any, dim: int) -> int:
    """The index in the whole tensor at which this rank's part begins."""
    return compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)[1][dim]
