"""Functions for tests and benchmarks that compare kernels' errors with eager PyTorch's.

`yardstick` allows a kernel twice eager PyTorch's error, instead of a fixed tolerance.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.backends import BACKENDS, backend, unavailable

__all__ = [
    "Errors",
    "backends",
    "check",
    "device_of",
    "errors",
    "gradients",
    "has_rows",
    "mean",
    "placed",
    "poisoned",
    "threads",
    "within",
    "yardstick",
]


def backends(op: str) -> list[str]:
    """The backends that can run operator `op` here, for `pytest.mark.parametrize`."""
    return [name for name in BACKENDS if unavailable(op, name) is None]


def device_of(name: str) -> torch.device:
    """The device whose tensors backend `name` takes."""
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cuda" if name in ("cuda", "triton") and not interpreted else "cpu")


def placed(args: tuple, device: torch.device) -> tuple:
    """`args` with its tensors on `device`, in the same memory layout."""
    return tuple(_placed(a, device) if isinstance(a, Tensor) else a for a in args)


def check(
    function: Callable,
    reference: Callable,
    args: tuple,
    name: str,
    draws: Iterable[Callable] = (),
    **kwargs: Any,
) -> None:
    """Asserts that `function` on backend `name` is as accurate as eager PyTorch, backward too.

    The exact result is `reference` in float64; eager's is `reference` in the dtype of `args`. Each
    result and each gradient must pass `yardstick`. Floating-point tensors in `args` get gradients.
    Everything runs on the backend's device, because a dropout mask depends on the device.

    draws: the reference with its terms in other orders. If a few large terms make up a result,
    eager's error is sometimes almost zero by chance; each result may pass against any of them.
    """
    args = placed(args, device_of(name))
    with backend(name), poisoned():
        kernel = gradients(function, args, **kwargs)
    eager = gradients(reference, args, **kwargs)
    exact = gradients(reference, tuple(_to_float64(a) for a in args), **kwargs)
    assert kernel.keys() == eager.keys()
    complaints = {}
    for key, value in kernel.items():
        assert value.dtype == eager[key].dtype, f"{key}: {value.dtype}, not {eager[key].dtype}"
        assert value.shape == eager[key].shape, f"{key}: {value.shape}, not {eager[key].shape}"
        complaints[key] = yardstick(value, eager[key], exact[key])
    for draw in draws:
        if not (left := [key for key, complaint in complaints.items() if complaint is not None]):
            break
        eager = gradients(draw, args, **kwargs)
        complaints |= {key: yardstick(kernel[key], eager[key], exact[key]) for key in left}
    for key, complaint in complaints.items():
        assert complaint is None, f"{name}: {key}: {complaint}"


def gradients(function: Callable, args: tuple, **kwargs: Any) -> dict[str, Tensor]:
    """The outputs of `function(*args)` and the gradients of its floating-point args, by name.

    The random numbers (dropout, output gradients) are the same in each call. Output gradients are
    drawn in float32, so that every dtype of `args` gets the same ones. A scalar output's gradient
    is 2, which multiplies exactly in every dtype; rounding there would be an error in all
    gradients.
    """
    leaves = [a.detach().requires_grad_() if _floating(a) else a for a in args]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        outputs = function(*leaves, **kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        cotangents = [_cotangent(o) for o in outputs]
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    inputs = [leaf for leaf in leaves if _floating(leaf)]
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    roots, directions = zip(*live, strict=True)
    grads = torch.autograd.grad(roots, inputs, directions, allow_unused=True)
    results |= {f"gradient {i}": g for i, g in enumerate(grads) if g is not None}
    return results


def _cotangent(output: Tensor) -> Tensor:
    if not output.dim():
        return torch.full_like(output, 2.0)
    return torch.randn(output.shape, dtype=torch.float32, device="cpu").to(output)


def yardstick(kernel: Tensor, eager: Tensor, exact: Tensor) -> str | None:
    """Describes why `kernel` is too inaccurate; None if its error is at most twice eager's.

        |kernel - exact| <= 2 |eager - exact| + eps(dtype) / 2 |exact|

    in max norm and in RMS norm, over the whole tensor and over each of its rows longer than 64.
    """
    complaint = within(kernel, eager, exact, rows=False)
    if complaint is None and has_rows(exact):
        complaint = within(kernel, eager, exact, rows=True)
    return complaint


def has_rows(exact: Tensor) -> bool:
    """Whether the yardstick checks each row."""
    return exact.dim() > 1 and exact.shape[-1] > 64


def within(kernel: Tensor, eager: Tensor, exact: Tensor, *, rows: bool) -> str | None:
    """`yardstick` over each row (the last dimension), or over the whole tensor."""
    if exact.numel() == 0:
        return None
    comparison = errors(kernel, eager, exact, rows=rows)
    return comparison if isinstance(comparison, str) else comparison.complaint()


class Errors(NamedTuple):
    """Max and RMS norms per row, [2, rows]: the kernel's error, eager's, and the result's size."""

    kernel: Tensor
    eager: Tensor
    result: Tensor
    half_ulp: Tensor  # relative

    def complaint(self, times: float = 2) -> str | None:
        """The first norm in which the kernel's error exceeds `times` eager's, or None."""
        for name, error, allowed, size in zip(("max", "RMS"), *self[:3], strict=True):
            beyond = error - times * allowed - self.half_ulp * size
            if (beyond > 0).any():
                i, bad = int(beyond.argmax()), int((beyond > 0).sum())
                return (
                    f"{name} norm of the error is {error[i]:.3e}, eager's is {allowed[i]:.3e}, "
                    f"of the result {size[i]:.3e} ({bad} of {len(beyond)} rows)"
                )
        return None


def mean(draws: Sequence[Errors]) -> Errors:
    """The mean over several random inputs: one input's largest error is chance, the mean is not."""
    return Errors(*(torch.stack(norms).mean(0) for norms in zip(*draws, strict=True)))


def errors(kernel: Tensor, eager: Tensor, exact: Tensor, *, rows: bool) -> Errors | str:
    """The norms that `within` compares; or a text, if NaNs or infinities are misplaced."""
    half_ulp = torch.finfo(kernel.dtype).eps / 2
    kernel, eager, exact = (
        t.double().reshape(-1, t.shape[-1] if rows else t.numel()) for t in (kernel, eager, exact)
    )
    if not torch.equal(kernel.isnan(), exact.isnan()):
        return "NaN where the exact result has none, or no NaN where it has one"
    astray = kernel.isinf() & (kernel != exact) & (kernel != eager)
    astray |= exact.isinf() & (kernel != exact) & (eager == exact)
    if astray.any():
        return (
            f"infinite where the result is finite, or finite where it is infinite: "
            f"{astray.sum()} times"
        )
    parts = [t.nan_to_num(0, 0, 0) for t in (kernel - exact, eager - exact, exact)]
    error, allowed, size = (
        torch.stack([torch.linalg.vector_norm(t, norm, -1) for norm in (torch.inf, 2)])
        for t in parts
    )
    return Errors(error, allowed, size, size.new_full((), half_ulp))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills fresh tensors with NaN, so that a kernel that skips an element is caught."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Runs the block with `number` threads per operator, then restores the old number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _placed(a: Tensor, device: torch.device) -> Tensor:
    """Moves all of the memory behind `a`: strides and offset choose a kernel's path."""
    if a.device.type == device.type:
        return a
    memory = a.detach().as_strided((a.untyped_storage().nbytes() // a.itemsize,), (1,), 0)
    return memory.to(device).as_strided(a.shape, a.stride(), a.storage_offset())


def _floating(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def _to_float64(a: Any) -> Any:
    return a.detach().double() if _floating(a) else a
