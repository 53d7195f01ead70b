"""What calls on DTensors need above their kernels: shared seeds, and replicated masks."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["replicated", "sharded_call"]


def _dtensor(*tensors: Any) -> Any:
    """The first DTensor, or None. It does not import DTensor's module, which takes 0.4 s."""
    if torch.compiler.is_compiling():
        return None
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    return next((t for t in tensors if isinstance(t, module.DTensor)), None)


def sharded_call(dropout_p: float, *tensors: Any) -> AbstractContextManager:
    """Enclose an operator's call with this. It does nothing unless a tensor is a DTensor.

    The formulas that run instead of kernels, for float64 among others, create masks and ranges as
    plain tensors. They are the same on all ranks, and DTensor takes them as replicated.
    """
    sharded = _dtensor(*tensors)
    return nullcontext() if sharded is None else _sharded_call(sharded.device_mesh, dropout_p)


@contextmanager
def _sharded_call(mesh: Any, dropout_p: float) -> Iterator[None]:
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication(), _shared_seed(mesh) if dropout_p else nullcontext():
        yield


@contextmanager
def _shared_seed(mesh: Any) -> Iterator[None]:
    """Seeds the generator alike on all ranks of the mesh, and restores each rank's own after it."""
    seed = torch.randint(2**62, (), device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.broadcast(seed, group=mesh.get_group(dim), group_src=0)
    module = None if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
    devices = [] if module is None else [module.current_device()]
    with torch.random.fork_rng(devices, device_type=mesh.device_type if module else "cuda"):
        reseed = module.manual_seed if module else torch.default_generator.manual_seed
        reseed(int(seed))
        yield


def replicated(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, with the DTensors among them gathered on every rank."""
    return [t if _dtensor(t) is None else _gathered(t) for t in tensors]


def _gathered(t: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    return t.redistribute(t.device_mesh, [Replicate()] * t.device_mesh.ndim)
