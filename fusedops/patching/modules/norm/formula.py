"""The formulas that a norm module can have, and when two results count as equal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fusedops import functional as F
from fusedops.functional import norm as references

__all__ = ["FORMULAS", "Formula", "same"]


@dataclass(frozen=True)
class Formula:
    """layer_norm, or rms_norm with one of its roundings (see fusedops.functional)."""

    function: str
    rounding: str = ""
    offset: float = 0.0

    @property
    def how(self) -> dict:
        return {"rounding": self.rounding, "offset": self.offset} if self.rounding else {}

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value!r}" for name, value in self.how.items() if value)
        return f"{self.function}({how})" if how else self.function

    @property
    def fused(self) -> Callable:
        """(x, shape, weight, [bias,] eps) -> y; only layer_norm has a bias."""
        return partial(getattr(F, self.function), **self.how)

    @property
    def fused_add(self) -> Callable:
        """(x, residual, weight, [bias,] eps, dropout_p=) -> (y, h)."""
        return partial(getattr(F, f"add_{self.function}"), **self.how)

    @property
    def reference(self) -> Callable:
        """`fused` in plain PyTorch."""
        return partial(getattr(references, f"{self.function}_reference"), **self.how)


FORMULAS = (
    Formula("layer_norm"),
    Formula("rms_norm", "llama"),
    Formula("rms_norm", "torch"),
    Formula("rms_norm", "llama", 1.0),
    Formula("rms_norm", "torch", 1.0),
)


def same(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether results for inputs of `dtype` are equal up to summation order, with equal dtypes.

    In float32 and float64 that means a few ulp in max norm. A 16-bit input is rounded on the way,
    so another order may move 1 element in 10,000 by one rounding step in bfloat16, and 8 in
    float16, whose steps are 8 times finer. A wrong rounding moves 1 in 4.
    """
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    wide = torch.promote_types(got.dtype, torch.float32)
    got, wanted = got.to(wide), wanted.to(wide)
    off, size = (got - wanted).abs_(), wanted.abs()
    floor = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size.max()
    moved = ~(off <= floor)  # NaN too
    if dtype.itemsize > 2:
        return not moved.any()
    eps = torch.finfo(dtype).eps
    share = 1e-4 * torch.finfo(torch.bfloat16).eps / eps
    one_step = off[moved] <= eps * size[moved] + floor
    return len(one_step) <= share * moved.numel() and bool(one_step.all())
