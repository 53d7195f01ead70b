"""The losses of a head that calibrate times: without logits, beside cross_entropy of its logits."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.calibration.choice import head_kind
from fusedops.calibration.contest import Case, Contest, drawn_size
from fusedops.functional import cross_entropy, linear_cross_entropy

__all__ = ["case", "cases", "draw"]

ROWS, CLASSES, DEPTHS = (16, 128, 1024), (1024, 8192, 32768), (64, 512)
MOST_TERMS = {torch.bfloat16: 2**27, torch.float16: 2**24}  # rows x classes x depth
MOST_DRAWN = 2**28


def cases() -> Iterator[Case]:
    for dtype, trains in itertools.product(MOST_TERMS, (False, True)):
        for rows, classes, depth in itertools.product(ROWS, CLASSES, DEPTHS):
            if rows * classes * depth <= MOST_TERMS[dtype]:
                yield case(dtype, trains, (rows, classes, depth))


def draw(random: Random) -> Case:
    """A call of any kind and sizes."""
    dtype, trains = random.choice([*MOST_TERMS]), random.random() < 0.5
    while True:
        rows, classes = drawn_size(random, 8, 4096), drawn_size(random, 512, 2**17)
        sizes = rows, classes, drawn_size(random, 32, 2048)
        if math.prod(sizes) < MOST_DRAWN:
            return case(dtype, trains, sizes)


def case(dtype: torch.dtype, trains: bool, sizes: tuple[int, ...]) -> Case:
    """sizes: rows, classes, depth."""
    return Case(head_kind(dtype, trains), sizes, partial(_contest, dtype, trains, *sizes))


def _contest(dtype: torch.dtype, trains: bool, rows: int, classes: int, depth: int) -> Contest:
    random = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, depth, generator=random, dtype=torch.float32, device="cpu").to(dtype)
        for n in (rows, classes)
    )
    target = torch.randint(classes, (rows,), generator=random, device="cpu")
    weight = weight / depth**0.5

    def with_logits(x: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(F.linear(x, weight), target)

    def results(run, x: Tensor, weight: Tensor):
        if not trains:
            return partial(run, x, weight)
        inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return lambda: torch.autograd.grad(run(*inputs), inputs)

    return Contest(
        results(lambda x, weight: linear_cross_entropy(x, weight, target), x, weight),
        results(with_logits, x, weight),
        lambda: results(with_logits, x.double(), weight.double())(),
        trains,
    )
