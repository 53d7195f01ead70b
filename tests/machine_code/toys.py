"""Toy Triton kernels, some with a fault that the machine-code checks must detect."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch

DEMANDS = {
    "copy": Demand(loads=1, stores=1),
    "dot": Demand(dot=True),
    "no_dot": Demand(dot=True),
    "spill": Demand(),
}


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n, 0), at < n)


@triton.jit
def dot(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a = tl.load(x + at)
    tl.store(y + at, tl.dot(a, a).to(a.dtype))


@triton.jit
def no_dot(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def spill(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    total = tl.sum(a)  # before any element is stored
    tl.store(y + at, a * total)


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    for n in (1024, 2048, 1000):  # the second is compiled like the first
        yield "", f"n = {n}", partial(launch, copy, n, BLOCK=1024)
    yield "", "", partial(launch, dot, BLOCK=128)
    yield "", "", partial(launch, no_dot, BLOCK=128)
    yield "", "", partial(launch, spill, BLOCK=16384, maxnreg=32)


def launch(kernel: triton.JITFunction, *args: int, **options: int) -> None:
    x = torch.empty(128 * 128, dtype=torch.bfloat16)
    kernel[(1,)](x, torch.empty_like(x), *args, **options, num_warps=4)


def demand(launch: Launch) -> Demand:
    return DEMANDS[launch.kernel.__name__]
