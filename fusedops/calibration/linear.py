"""The calls of linear that calibrate times, beside torch's: a product without an activation."""

import functools
import itertools
from collections.abc import Iterator
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.calibration.contest import Case, Contest, drawn_size
from fusedops.extension import _C

__all__ = ["case", "cases", "draw"]

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIDES = 64, 256, 1024, 4096  # columns, depth
ROWS, MOST_TERMS, MOST_DRAWN = (64, 256, 1024), 2**27, 2**30
FEW, FEW_SIDES = (1, 4, 16, 32), (64, 512, 4096)
MEMORY = 2**26  # bytes of weights that calls read in turn: a model's weights are not in the cache


def cases() -> Iterator[Case]:
    """Few rows by their own kernel, and other products of float32 with weights of either order."""
    for dtype in DTYPES:
        for sizes in itertools.product(FEW, FEW_SIDES, FEW_SIDES):
            yield case(dtype, "few", sizes)
    for form, rows, columns, depth in itertools.product(("product", "across"), ROWS, SIDES, SIDES):
        if rows * columns * depth <= MOST_TERMS:
            yield case(torch.float32, form, (rows, columns, depth))


def draw(random: Random) -> Case:
    """A call of any kind and number of rows. Models' weights have sides that 32 divides."""
    form = random.choice(("few", "product", "across"))
    dtype = random.choice(DTYPES) if form == "few" else torch.float32
    while True:
        rows = drawn_size(random, 1, 32) if form == "few" else drawn_size(random, 33, 4096)
        columns, depth = 32 * drawn_size(random, 1, 256), 32 * drawn_size(random, 1, 256)
        if rows * columns * depth < MOST_DRAWN and columns * depth * dtype.itemsize <= MEMORY:
            return case(dtype, form, (rows, columns, depth))


def case(dtype: torch.dtype, form: str, sizes: tuple[int, ...]) -> Case:
    """form: "few", "product" or "across" (the weight is transposed while it is packed).

    sizes: rows, columns, depth.
    """
    kind = f"linear {str(dtype).removeprefix('torch.')} {form}"
    return Case(kind, sizes, partial(_contest, dtype, form, *sizes))


def _contest(dtype: torch.dtype, form: str, rows: int, columns: int, depth: int) -> Contest:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, depth, generator=random, dtype=torch.float32, device="cpu").to(dtype)
    shape = (depth, columns) if form == "product" else (columns, depth)
    numbers = _numbers(dtype)
    count = len(numbers) // (columns * depth)
    weights = [*numbers[: count * columns * depth].view(count, *shape)]
    if form == "product":
        weights = [weight.t() for weight in weights]
    ours, torchs = itertools.cycle(weights), itertools.cycle(weights)
    return Contest(
        lambda: _C.linear(x, next(ours), None, None),
        lambda: F.linear(x, next(torchs)),
        lambda: F.linear(x.double(), weights[0].double()),
        False,
    )


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(
        MEMORY // dtype.itemsize, generator=random, dtype=torch.float32, device="cpu"
    ).to(dtype)
