"""How much memory a sweep may use, and what a larger point would take."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fusedops.machine import available_memory
from fusedops.profiling.storage.use import MemoryUse

__all__ = ["Peaks", "limit_bytes"]


def limit_bytes(limit: float | int, held: int) -> int:
    """The most bytes that a step may hold.

    limit: an int is bytes; a float is a fraction of the memory that is available now, which comes
    on top of the `held` bytes that the model and its optimizer already have.
    """
    return limit if isinstance(limit, int) else held + int(limit * available_memory())


GROWING = ("activations", "logits", "inputs", "kv_cache")  # with the batch


@dataclass
class Peaks:
    """The measured peaks of one variant, and from them that of a larger point.

    A step has two peaks: in the optimizer, where it does not depend on the batch, and at the end of
    the forward, where it is fixed + a x batch x length + b x batch x length^2. `fixed` is what
    parameters, buffers and optimizer state hold, until two points tell it; b needs two lengths.
    """

    fixed: int = 0
    largest: int = 0
    points: list[tuple[int, int, int]] = field(default_factory=list)  # batch, length, bytes

    def add(self, batch: int, length: int | None, use: MemoryUse) -> None:
        """Takes up a point. While the optimizer has the peak, the forward's is what it holds."""
        self.fixed = use.parameters + use.buffers + use.optimizer_state
        self.largest = max(self.largest, use.peak)
        growing = sum(getattr(use, name) for name in GROWING)
        at_peak = sum(use.at_peak.get(name, 0) for name in GROWING)
        forward = use.peak if at_peak >= growing / 2 else self.fixed + growing
        self.points.append((batch, length or 1, forward))

    def predict(self, batch: int, length: int | None) -> int | None:
        """The peak of a point; None before the first one was measured."""
        if not self.points:
            return None
        fit = self._fit()
        features = _features((batch, length or 1), len(fit))
        forward = float(torch.dot(fit, torch.tensor(features, dtype=torch.float64, device="cpu")))
        return max(self.largest, round(forward))

    def _known(self) -> int:
        """How many terms the points can tell."""
        lengths = {length for _, length, _ in self.points}
        return 1 + min(1 + (len(lengths) > 1), max(1, len(self.points) - 1))

    def _fit(self) -> torch.Tensor:
        """Least squares of the relative errors."""
        if len(self.points) == 1:
            batch, length, peak = self.points[0]
            values = [self.fixed, max(0, peak - self.fixed) / (batch * length)]
            return torch.tensor(values, dtype=torch.float64, device="cpu")
        for terms in range(self._known(), 1, -1):
            solved = self._solved(terms)
            if bool((solved[1:] >= 0).all()):  # bytes do not shrink with the batch or the length
                return solved
        return solved

    def _solved(self, terms: int) -> torch.Tensor:
        features = [_features((b, length), terms) for b, length, _ in self.points]
        rows = torch.tensor(features, dtype=torch.float64, device="cpu")
        largest = rows.amax(0)
        wanted = torch.tensor([[p] for *_, p in self.points], dtype=torch.float64, device="cpu")
        peaks = wanted.clamp(min=1)
        solved = torch.linalg.lstsq(rows / largest / peaks, wanted / peaks).solution
        return solved[:, 0] / largest


def _features(point: tuple[int, int], terms: int) -> Sequence[float]:
    batch, length = point
    return (1.0, float(batch * length), float(batch * length**2))[:terms]
