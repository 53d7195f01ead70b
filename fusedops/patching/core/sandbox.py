"""Runs a model's code in isolation from modes, hooks, warnings and the random state."""

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "bare",
    "device_of",
    "drawn",
    "quiet",
    "undisturbed",
]

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


def device_of(module: nn.Module) -> str:
    """The device to probe on: the module's, or the CPU for one without storage."""
    kinds = {p.device.type for p in module.parameters()} - {"meta"}
    return next(iter(kinds), "cpu")


def drawn(draw: torch.Generator, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Normal random numbers on the CPU, whatever the default device and dtype are."""
    return torch.randn(shape, generator=draw, dtype=dtype, device="cpu")


def bare(module: nn.Module) -> nn.Module:
    """A shallow copy of the module without its hooks."""
    new = object.__new__(type(module))
    hooks: dict = {k: OrderedDict() for k in vars(module) if k.endswith("_hooks")}
    vars(new).update({**vars(module), **hooks})
    return new


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disables the caller's modes and transforms, so that tensors are plain and have gradients."""
    plain = torch.inference_mode(False)
    with plain, _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


@contextmanager
def quiet(device: str) -> Iterator[None]:
    """Suppresses warnings and preserves the random state."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
