"""Helpers shared by several Triton operators: launches, CUDA graph checks, dropout, tanh, exp."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp is five
# Initial maximum: the least float32, so that exp(z - largest) is 0 for -inf, not NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


def outputs_of(operator: Any, *arguments: Any) -> Any:
    """Checks the arguments and allocates the outputs with the operator's Meta kernel."""
    return operator.redispatch(_keys(torch._C.DispatchKey.Meta), *arguments)


def composite(operator: Any, *arguments: Any) -> Any:
    """Runs an operator's ATen calls, for arguments without a kernel."""
    return operator.redispatch(_keys(torch._C.DispatchKey.PrivateUse3), *arguments)


_keys = functools.cache(torch._C.DispatchKeySet)

compiled: list[str] = []  # the kernels that this process compiled or loaded, in order


def launched(kernel: Any) -> Any:
    """Marks a kernel that the host launches: it does not compile during a CUDA graph's capture.

    Compiling, or loading what an earlier process compiled, would end the capture with an error of
    CUDA's that names neither the kernel nor a way out.
    """
    if not hasattr(kernel, "_do_compile"):  # the interpreter's, which compiles nothing
        return kernel
    compile_kernel = kernel._do_compile
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"

    def compile_before_capture(*args: Any, **kwargs: Any) -> Any:
        check_before_capture(f"{name} is not compiled for these arguments")
        binary = compile_kernel(*args, **kwargs)
        compiled.append(name)
        return binary

    kernel._do_compile = compile_before_capture
    return kernel


def check_before_capture(missing: str) -> None:
    """Raises RuntimeError if a CUDA graph is being captured. missing: what it would need."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{missing}, which a CUDA graph's capture cannot change: "
            "call fusedops.warm(model, batch) before the capture"
        )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 3  # in the interpreter: few programs, but several parts
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """The size of the L2 cache; for CPU tensors, an H200's."""
    if device.type == "cpu":
        return 50 * 2**20
    return torch.cuda.get_device_properties(device).L2_cache_size


def dropout_arguments(p: float, seed: Tensor | None) -> tuple[Tensor | None, int, float]:
    """The kernels' (seed, threshold, scale); without dropout they compile without a seed."""
    if p == 0:
        return None, 0, 1.0
    return seed, min(int(p * 2**32), 2**32 - 1), 0.0 if p == 1 else 1 / (1 - p)


@triton.jit
def dropout(t, seed, threshold, scale, row, start, BLOCK: tl.constexpr):
    """A tile, [ROWS, BLOCK], after dropout; unchanged without a seed. row: [ROWS, 1] int64.

    One Philox counter serves four columns. One thread owns all four, so interleaving moves nothing
    between threads.
    """
    if seed is not None:
        group = start // 4 + tl.arange(0, BLOCK // 4)[None, :] + tl.zeros_like(row).to(tl.int32)
        zero = tl.zeros_like(group)
        low, high = zero + row.to(tl.int32), zero + (row >> 32).to(tl.int32)
        a, b, c, d = tl.philox(tl.load(seed), group, low, high, zero, n_rounds=7)
        even = tl.interleave(a >= threshold, c >= threshold)
        odd = tl.interleave(b >= threshold, d >= threshold)
        t *= tl.where(tl.interleave(even, odd), scale, 0.0)  # a dropped NaN is NaN
    return t


@triton.jit
def exact_exp(x):
    """exp within 1.3 ulp, for any x up to 80; 0 for x < -150.

    exp2(x LOG2E) has another ulp of error per 1.5 of x. This splits off the powers of 2 before a
    product is rounded.
    """
    x = tl.where(x < -150, -150.0, x)  # for -inf the rest would be NaN
    n = tl.floor(x * LOG2E + 0.5)
    rest = tl.fma(n, -0.693145751953125, x)  # ln 2: 16 bits of it, so that n times them is exact
    rest = tl.fma(n, -1.4286068203094172e-6, rest)
    return tl.exp2(n) * tl.exp2(rest * LOG2E)


@triton.jit
def tanh(x, EXACT: tl.constexpr = False):
    """tanh within 2 ulp; with EXACT, within 1.1.

    A polynomial near 0, where 1 - 2 / (1 + exp(2 |x|)) cancels. EXACT computes the divisor's sum
    without rounding.
    """
    size, square = tl.abs(x), x * x
    p = tl.fma(square, -0.00661576, 0.02131275)
    p = tl.fma(p, square, -0.05391007)
    p = tl.fma(p, square, 0.13333118)
    p = tl.fma(p, square, -0.33333332)
    if EXACT:
        power = exact_exp(2 * tl.where(size > 10, 10.0, size))
        divisor = 1 + power
        share = 2 / divisor
        large = 1 - (share - share * ((1 - (divisor - power)) / divisor))
    else:
        large = 1 - 2 / (1 + tl.exp2(size * (2 * LOG2E)))
    return tl.where(size < 0.55, tl.fma(x, square * p, x), tl.where(x < 0, -large, large))


@functools.cache
def architecture(device: torch.device) -> int:
    """The GPU's architecture, such as 90 for sm_90; for CPU tensors, the compiler's target."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return triton.runtime.driver.active.get_current_target().arch
