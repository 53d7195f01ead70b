"""AdamW's benchmark contenders: torch, bitsandbytes, torchao and fusedops.

Each takes parameters that have gradients and returns the call to time. The first call creates the
state, and compiles the step if the contender needs that.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fusedops
from benchmarks.harness.case import Skip, find
from fusedops.backends import version_of

Step = Callable[[], object]
Make = Callable[[list[Tensor]], Step]

MAX_NORM = 1.0

# Notes on peers that a reader needs to judge their figures.
PEERS = {
    "bitsandbytes": "uint8 codes of its dynamic map, a float32 scale for 256 elements; float32 for "
    "tensors of fewer than 4096; eager calls, on as many threads as ours; 16-bit parameters are "
    "rounded to nearest",
    "torchao": "uint8 codes of the same map, a float32 scale for 256 elements; the parameter's "
    "dtype for tensors of fewer than 4096 or of no multiple of 256; a call of torch.compile's for "
    "each tensor, compiled before it is timed, on as many threads as ours; 16-bit parameters are "
    "rounded to nearest where nothing else is said",
}


def about(contender: str) -> dict[str, str | None]:
    """Returns a peer's version and the format of its state; empty for others."""
    package = contender.partition(",")[0]
    found = {"version": version_of(package), "about": PEERS.get(package)}
    return found if package in PEERS else {}


def bytes_moved(elements: int, itemsize: int, state_dtype: str, clips: bool = False) -> int:
    """Returns bytes that a step must move: parameters and moments twice, gradients once or twice.

    The second time is for clipping. Two 8-bit moments have two float32 scales per 256 elements.
    """
    moments = {"float32": 8.0, "int8": 2 + 8 / 256}[state_dtype]
    return int(elements * ((3 + clips) * itemsize + 2 * moments))


def torch_fused(params: list[Tensor]) -> Step:
    return torch.optim.AdamW(params, fused=True).step


def ours(params: list[Tensor], **options) -> Step:
    return fusedops.optim.AdamW(params, **options).step


def bitsandbytes(params: list[Tensor], name: str = "AdamW8bit") -> Step:
    return find("bitsandbytes.optim", name)(params).step


def torchao(params: list[Tensor], **options) -> Step:
    compiler = os.environ.get("CXX", "g++")
    if params[0].device.type == "cpu" and shutil.which(compiler) is None:
        raise Skip(f"torchao's step is compiled: it needs a C++ compiler, {compiler} was not found")
    torch.compiler.reset()  # else each call checks what other rows compiled
    return find("torchao.optim", "AdamW8bit")(params, **options).step


def torch_clip(params: list[Tensor]) -> Step:
    return partial(torch.nn.utils.clip_grad_norm_, params, MAX_NORM)


def our_clip(params: list[Tensor]) -> Step:
    return partial(fusedops.clip_grad_norm_, params, MAX_NORM)


def clipped(make: Make) -> Make:
    """torch's clipping followed by the step, as in training loops."""

    def prepare(params: list[Tensor]) -> Step:
        clip, step = torch_clip(params), make(params)

        def clip_and_step() -> None:
            clip()
            step()

        return clip_and_step

    return prepare
