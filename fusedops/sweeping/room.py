"""Computes a sweep's memory limit, and predicts peak memory at larger batches or lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusedops.machine import available_memory
from fusedops.measuring.memory.memory_use import MemoryUse

__all__ = ["Peaks", "limit_bytes"]


def limit_bytes(limit: float | int, held: int) -> int:
    """The most bytes that a step may hold.

    limit: an int is bytes; a float is a fraction of the memory that is available now, which comes
    on top of the `held` bytes that the model and its optimizer already have.
    """
    return limit if isinstance(limit, int) else held + int(limit * available_memory())


GROWING = ("activations", "logits", "inputs", "kv_cache")  # with the batch; temporaries do too
FIXED = ("parameters", "buffers", "gradients", "optimizer_state")


@dataclass(frozen=True)
class _Point:
    """The end of a forward. fixed: bytes that do not depend on the batch; grown: the others."""

    batch: int
    length: int
    fixed: int
    grown: int


@dataclass
class Peaks:
    """The measured peaks of one variant, and from them that of a larger point.

    A step has two peaks: in the optimizer, where it does not depend on the batch, and at the end of
    the forward, where it is what parameters, gradients and state hold, plus c + a x batch x length
    + b x batch x length^2. b needs two lengths, and c is 0 until two points tell it.
    """

    largest: int = 0
    seen: list[_Point] = field(default_factory=list)  # where the forward's end had the peak
    guessed: list[_Point] = field(default_factory=list)  # where the optimizer had it

    def add(self, batch: int, length: int | None, use: MemoryUse) -> None:
        """Takes up a point."""
        self.largest = max(self.largest, use.peak)
        growing = sum(getattr(use, name) for name in GROWING)
        at_peak = sum(use.at_peak.get(name, 0) for name in GROWING)
        if at_peak >= growing / 2:
            fixed = sum(use.at_peak.get(name, 0) for name in FIXED)
            self.seen.append(_Point(batch, length or 1, fixed, use.peak - fixed))
        else:
            fixed = use.parameters + use.buffers + use.optimizer_state
            self.guessed.append(_Point(batch, length or 1, fixed, growing))

    def predict(self, batch: int, length: int | None) -> int | None:
        """The peak of a point; None before the first one was measured."""
        points = self.seen or self.guessed
        if not points:
            return None
        terms = _fit(points)
        grown = sum(
            term * size for term, size in zip(terms, _sizes(batch, length or 1), strict=False)
        )
        return max(self.largest, round(points[-1].fixed + grown))


def _sizes(batch: int, length: int) -> tuple[int, int, int]:
    return batch * length, 1, batch * length**2


def _fit(points: Sequence[_Point]) -> list[float]:
    """The factors of the first `_sizes`, by least squares of the relative errors."""
    lengths = {point.length for point in points}
    for terms in range(min(len(points), 3 if len(lengths) > 1 else 2), 1, -1):
        solved = _solved(points, terms)
        if min(solved[::2]) >= 0:  # bytes do not shrink with the batch or the length
            return solved
    return _solved(points, 1)


def _solved(points: Sequence[_Point], terms: int) -> list[float]:
    sizes = [_sizes(point.batch, point.length)[:terms] for point in points]
    rows = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    largest = rows.amax(0)
    bytes_grown = torch.tensor([[p.grown] for p in points], dtype=torch.float64, device="cpu")
    grown = bytes_grown.clamp(min=1)
    solved = torch.linalg.lstsq(rows / largest / grown, bytes_grown / grown).solution
    return (solved[:, 0] / largest).tolist()
