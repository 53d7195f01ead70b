"""Ratios of noisy timings that were taken in pairs, with intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusedops.measuring.quantiles import float64, quantiles

__all__ = ["Ratio", "Spread", "expanded", "paired_ratio", "spread"]


class Spread(NamedTuple):
    """Median with the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


class Ratio(NamedTuple):
    """Median of the paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}..{self.high:.2f})"


def spread(samples: Sequence[float]) -> Spread:
    return Spread(*quantiles(samples, 0.5, 0.1, 0.9))


def paired_ratio(base: Sequence[float], other: Sequence[float], resamples: int = 2000) -> Ratio:
    """How many times faster `other` is than `base`: the median of base[i] / other[i].

    Both were measured in the same round i, so a slowdown of the machine in that round cancels out.
    The interval is a percentile bootstrap over rounds, with a fixed seed.
    """
    ratios = float64(base) / float64(other)
    random = torch.Generator("cpu").manual_seed(0)
    draw = torch.randint(
        len(ratios), (resamples, len(ratios)), generator=random, device=ratios.device
    )
    low, high = quantiles(ratios[draw].quantile(0.5, dim=1).tolist(), 0.025, 0.975)
    return Ratio(float(ratios.quantile(0.5)), low, high)


def expanded(ratio: Ratio, n: int) -> Ratio:
    """Widens a percentile bootstrap's interval, which is too narrow for few samples.

    By sqrt(n / (n - 1)) and Student's t over the normal quantile (Hesterberg, arXiv:1411.5279),
    with t from its expansion in 1 / (n - 1).
    """
    z, free = 1.96, max(1, n - 1)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    power = t / z * math.sqrt(n / free)
    low, high = (ratio.median * (end / ratio.median) ** power for end in (ratio.low, ratio.high))
    return Ratio(ratio.median, low, high)
