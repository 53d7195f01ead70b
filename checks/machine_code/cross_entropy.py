"""Launches of the Triton cross-entropy kernels, and memory accesses required of their code.

Global memory is accessed 16 bytes at a time, and each byte once, except that a forward that
computes the gradient reads a row again. Rows that are not whole vectors take as many vector
accesses: only elements before the first aligned vector and after the last are accessed singly. That
holds if logits and gradients have the same alignment; otherwise the stores are vectors.

Without options, a loop loads each tile before the arithmetic of the last one.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.cross_entropy.logits import MEAN, NONE, LossLaunch

BYTES = {"*bf16": 2, "*fp32": 4}
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PLAIN, ALL = (0.0, 0.0, 1.0, 0.0), (0.1, 0.1, 2.0, 30.0)
# Dtypes of logits and gradient: for cross_entropy, and for a 16-bit matmul.
DTYPES = {"bf16": (BF16, BF16), "fp32": (FP32, FP32), "fp32 to bf16": (FP32, BF16)}
# One warp, several, the most allowed; then a vocabulary's rows, in whole vectors and ragged.
LENGTHS = (1024, 4096, 128256, 33, 50257)


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(variant, case, call): each kernel in its dtypes and options; a selection if quick."""
    for name, dtypes in DTYPES.items():
        for scalars in (PLAIN,) if quick else (PLAIN, ALL):
            for n in LENGTHS[2::2] if quick else LENGTHS:
                options = "" if scalars is PLAIN else ", all options"
                choice = f"{name}{options}{', ragged' if n % 16 else ''}"
                for run, what in RUNS.items():
                    variant = f"cross entropy{what}, {choice}"
                    yield variant, f"n = {n}, {run.__name__}", partial(run, n, scalars, *dtypes)
    padded = partial(backward, 50257, PLAIN, BF16, BF16, 50304)
    yield "cross entropy, bf16, ragged gradients of whole vectors", "n = 50257", padded


def forward(n: int, scalars: tuple, dtype: torch.dtype, _: torch.dtype) -> None:
    rows = torch.empty(2, dtype=FP64)
    call_of(n, scalars).forward(
        logits(n, dtype), bias_of(n, scalars), 0, None, rows, rows, None, rows[0]
    )


def forward_of_stripe(n: int, scalars: tuple, dtype: torch.dtype, _: torch.dtype) -> None:
    rows, state = torch.empty(2, dtype=FP64), torch.empty(5, 2, dtype=FP64)
    of = call_of(2 * n, scalars)
    of.forward(logits(n, dtype), bias_of(n, scalars), 16, state, rows, rows, None, rows[0])


def forward_and_gradient(n: int, scalars: tuple, dtype: torch.dtype, to: torch.dtype) -> None:
    rows, dx = torch.empty(2, dtype=FP64), logits(n, to)
    call_of(n, scalars).forward(
        logits(n, dtype), bias_of(n, scalars), 0, None, rows, rows, dx, rows[0]
    )


def backward(
    n: int, scalars: tuple, dtype: torch.dtype, to: torch.dtype, stride: int | None = None
) -> None:
    x, dx = logits(stride or n, dtype)[:, :n], logits(n, to)
    rows = torch.empty(2, dtype=FP64)
    call_of(n, scalars).backward(rows, x, bias_of(n, scalars), 0, rows, rows[0], dx)
    call_of(n, scalars).reduce(rows, rows[0], rows[0])


def call_of(classes: int, scalars: tuple) -> LossLaunch:
    weight = None if scalars is PLAIN else torch.empty(classes)
    reduction = NONE if scalars is PLAIN else MEAN
    return LossLaunch.of(
        torch.zeros(2, dtype=torch.int64), weight, classes, -100, reduction, scalars
    )


def bias_of(n: int, scalars: tuple) -> Tensor | None:
    return None if scalars is PLAIN else torch.empty(n)


def logits(n: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(2, n, dtype=dtype)


RUNS = {forward: "", forward_of_stripe: "", forward_and_gradient: " and gradient", backward: ""}


def demand(launch: Launch) -> Demand:
    """Demands one 16-byte access per 16 bytes that a thread reads or writes."""
    if launch.kernel.__name__ == "reduce_kernel":
        return Demand()
    facts = launch.constants
    writes_gradients = launch.kernel.__name__ == "forward_kernel" and launch.types["dx"] in BYTES
    same_layout = "dstride" in facts or not facts["RAGGED"]  # logits and gradients, in memory
    read = ["x"] if writes_gradients or same_layout or launch.types["dx"] not in BYTES else []
    if not facts["RAGGED"]:
        read += ["bias"] + ["weight"] * facts["SMOOTH"]
    # A loop has the loads of the next tile, and before it are those of the first.
    ahead = "x" in read and is_plain(launch)
    loads = vectors(launch, read + ["x"] * ahead)
    return Demand(
        loads=2 * loads if writes_gradients else loads,
        stores=2 * vectors(launch, ["dx"]),
    )


def is_plain(launch: Launch) -> bool:
    facts = launch.constants
    return facts["MAP"] != "capped" and not facts["SMOOTH"] and launch.types["bias"] not in BYTES


def vectors(launch: Launch, names: list[str]) -> int:
    """Returns the number of 16-byte vectors of the given arguments per thread and tile."""
    tile = launch.constants["UNROLL"] * launch.constants["VECTOR"]
    return sum(tile * BYTES.get(launch.types[name], 0) // 16 for name in names)
