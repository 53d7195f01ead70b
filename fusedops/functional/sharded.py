"""Helpers for calls on DTensors: shared dropout seeds, and replicated tensors for float64."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["replicated_in_float64", "sharded_call"]


def _dtensor(*tensors: Any) -> Any:
    """The first DTensor, or None. It does not import DTensor's module, which takes 0.4 s."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    return next((t for t in tensors if isinstance(t, module.DTensor)), None)


def sharded_call(dropout_p: float, *tensors: Any) -> AbstractContextManager:
    """A context for an operator's call on DTensors; does nothing for other tensors.

    All ranks draw the same seed. The formulas that run for float64 create masks and ranges as plain
    tensors; these are the same on all ranks, so DTensor takes them as replicated. torch.compile can
    do neither: the RuntimeError makes it run the call outside of its graphs.
    """
    if torch.compiler.is_compiling():
        sharded = any(hasattr(t, "device_mesh") for t in tensors)
        if sharded and (dropout_p or tensors[0].dtype == torch.float64):
            raise RuntimeError("torch.compile cannot compile dropout or float64 of DTensors")
        return nullcontext()
    sharded = _dtensor(*tensors)
    if sharded is None or not (dropout_p or sharded.dtype == torch.float64):
        return nullcontext()
    return _sharded_call(sharded, dropout_p)


@contextmanager
def _sharded_call(sharded: Any, dropout_p: float) -> Iterator[None]:
    replicates = sharded.dtype == torch.float64
    with (
        _implicit_replication(sharded) if replicates else nullcontext(),
        _shared_seed(sharded.device_mesh) if dropout_p else nullcontext(),
    ):
        yield


@contextmanager
def _implicit_replication(sharded: Any) -> Iterator[None]:
    """torch's, which turns itself off at its end also inside another one."""
    dispatcher = type(sharded)._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


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


def replicated_in_float64(*tensors: Any) -> Any:
    """The tensors. A first DTensor of float64 has all DTensors gathered on every rank."""
    first = None if torch.compiler.is_compiling() else _dtensor(tensors[0])
    if first is None or first.dtype != torch.float64:
        return tensors
    return [t if _dtensor(t) is None else _gathered(t) for t in tensors]


def _gathered(t: Any) -> Tensor:
    from torch.distributed.tensor import Replicate

    return t.redistribute(t.device_mesh, [Replicate()] * t.device_mesh.ndim)
