"""Recognises a write to a quantized weight that undoes an earlier one, to restore codes.

PEFT merges an adapter by writing f(weight), and unmerges it by writing f's inverse of what it then
reads. It reads the codes of f(weight), so the result is the old weight plus an error, and
quantizing it would not give the old codes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.functional.quantized_linear import QuantizedWeight, dequantize_weight

__all__ = ["Write", "undone"]

SUMS = 32  # of each row, with random signs: their mean square estimates the row's squared norm
SLACK = 3  # times the codes' error
LEAST_ALIKE = 0.2  # cosine of the codes' error and of what f's inverse makes of it
MOST_LEFT = 0.5  # of a change that is undone
ROUNDING = 0.5  # times eps: the root mean square of six roundings
LEAST_ROUNDING = 1e-5  # products in float32
ENOUGH = 8  # elements of a row, for a multiple of another row to be no chance
TINY = 1e-30  # instead of dividing by zero


class Write(NamedTuple):
    """A write to a weight [N, K]: the codes that it replaced, and what it changed."""

    before: QuantizedWeight
    change: Tensor  # written - read, as sums [N, SUMS]
    read: Tensor  # norm of each row that the writer read, [N]
    written: Tensor  # norm of each row that it wrote, [N]
    error: Tensor  # norm of each row's quantization error, [N]
    rounding: float  # of a row's numbers, relative to its norm

    @classmethod
    def of(
        cls,
        before: QuantizedWeight,
        read: Tensor,
        written: Tensor,
        now: Tensor,
        dtype: torch.dtype,
    ) -> "Write":
        """read, now: the weight before and after it, as the writer reads it. dtype: the layer's."""
        norms = _norms(read), _norms(written), _norms(now - written)
        rounding = max(ROUNDING * torch.finfo(dtype).eps, LEAST_ROUNDING)
        return cls(before, _sums(written - read), *norms, rounding)

    def is_undone(self, read: Tensor, target: Tensor, added: bool) -> bool:
        """Whether writing `target`, after reading `read`, takes the change back.

        added: the writer added a tensor to what it read.
        """
        device = target.device
        write = self._replace(
            **{n: t.to(device) for n, t in self._asdict().items() if hasattr(t, "to")}
        )
        old = dequantize_weight(write.before, read.dtype).to(target.dtype)
        read = read.to(target.dtype)
        opposite = write._is_opposite(_sums(target - read))
        if opposite and write._is_shifted_back(old, read, target, added):
            return True
        if added:
            return False
        return (opposite and write._ends_near(old, read, target)) or write._is_scaled_back(
            old, read, target, opposite
        )

    def _is_opposite(self, second: Tensor) -> bool:
        """Whether a second change points against the first."""
        lengths = torch.stack([_estimated_norms(s).norm() for s in (self.change, second)])
        share = lengths.max() / self.read.norm().clamp(min=TINY)
        if share <= LEAST_ROUNDING:  # nothing but rounding, as of adapters that are not trained
            return True
        cosine = (self.change * second).sum() / SUMS / lengths.prod().clamp(min=TINY)
        # The direction of a change by single roundings is mostly chance.
        return bool(cosine <= (-0.1 if share <= self.rounding else -0.5))

    def _is_shifted_back(self, old: Tensor, read: Tensor, target: Tensor, added: bool) -> bool:
        """Whether f added a tensor and scaled rows, as LoRA and DoRA do, and `target` undoes that.

        `target` is then the old weight plus a multiple of the codes' error in each row.
        """
        error, off = _sums(read - old) - self.change, _sums(target - old)
        factor = torch.ones_like(self.read)
        if not added and target.shape[1] >= ENOUGH:
            factor = (error * off).sum(1) / error.square().sum(1).clamp(min=TINY)
        left = _estimated_norms(off - factor[:, None] * error)
        size = torch.maximum(self.read, self.written) * factor.abs().clamp(min=1)
        rounding = self.rounding * size
        return bool((left <= 3 * rounding).all() and left.norm() <= rounding.norm())

    def _ends_near(self, old: Tensor, read: Tensor, target: Tensor) -> bool:
        """Whether `target` is the old weight plus what some inverse makes of the codes' error."""
        off, error = target - old, _sums(read - old) - self.change
        alike = (_sums(off) * error).sum() / (_sums(off).norm() * error.norm()).clamp(min=TINY)
        left = _estimated_norms(self.change + _sums(target - read)).norm()
        most = SLACK * self.error * self.read / self.written.clamp(min=TINY)
        near = (_norms(off) <= most + self.rounding * self.read).all()
        mostly = left <= MOST_LEFT * _estimated_norms(self.change).norm()
        return bool(near and mostly and alike >= LEAST_ALIKE)

    def _is_scaled_back(self, old: Tensor, read: Tensor, target: Tensor, opposite: bool) -> bool:
        """Whether f multiplied elements and `target` divides them, however small the factors.

        Then old * read / target is what was written, except where its codes are zeros.
        """
        moved = _estimated_norms(self.change).norm()
        large = moved > 10 * self.rounding * self.read.norm()
        if not (opposite or large):
            return False
        zeros = read == 0
        if (zeros & (target != 0)).any():
            return False
        again = torch.where(zeros, 0, old * read / target)
        off = _estimated_norms(_sums(again) - _sums(old) - self.change)
        lost = (zeros & (old != 0)).any(1)
        return bool((off <= 2 * self.rounding * self.written + SLACK * self.error * lost).all())


def undone(
    writes: Sequence[Write],
    read: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    added: bool = False,
) -> int | None:
    """Which of a layer's writes, oldest first, a write of `target` undoes; None if it undoes none.

    It does if it writes the very numbers of before one of them. It also does if it reverses the
    last one, as far as one can from codes. Each row must then end where the codes' error leads: at
    the old row plus a multiple of that error, or no farther from it than three times the error,
    relatively, and in its direction; or scaled back element by element. So if old codes are
    mistaken for a new weight, it is off by little more than quantizing costs.
    """
    wide = torch.promote_types(dtype, torch.float32)
    numbers = target.to(wide)
    for index in reversed(range(len(writes))):
        before = writes[index].before.to(target.device)
        for seen in {dtype, wide}:
            if torch.equal(numbers, dequantize_weight(before, seen).to(wide)):
                return index
    return len(writes) - 1 if writes and writes[-1].is_undone(read, numbers, added) else None


def _norms(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide)


def _estimated_norms(sums: Tensor) -> Tensor:
    return sums.square().mean(1).sqrt()


def _sums(rows: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, (rows.shape[1], SUMS), generator=generator, device="cpu") * 2 - 1
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) @ signs.to(rows.device, wide)
