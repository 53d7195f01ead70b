"""Quantiles of samples, and the confidence interval of their median."""

from collections.abc import Sequence
from math import comb

import torch

__all__ = ["FEWEST", "NEEDED", "float64", "median_interval", "quantile", "quantiles"]

NEEDED = {0.95: 20, 0.99: 100}  # share -> samples: below, no sample is expected beyond it
FEWEST = 6  # samples: the interval from the least to the largest then covers 97 %


def quantiles(samples: Sequence[float], *shares: float) -> list[float]:
    """Interpolates linearly between samples. Uses torch, as numpy may be missing."""
    return float64(samples).quantile(float64(shares)).tolist()


def float64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def quantile(samples: Sequence[float], share: float) -> float | None:
    """The quantile, or None if there are too few samples for it; nothing is extrapolated."""
    if len(samples) < NEEDED.get(share, 1):
        return None
    return quantiles(samples, share)[0]


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: two order statistics, whatever the distribution is.

    Fewer than 6 samples cannot give one; then it is from the least to the largest.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


def _rank(n: int) -> int:
    """The largest k for which at most 2.5 % of all draws have k or fewer samples below."""
    below, k = 0.0, -1
    while k + 1 < n // 2 and below + comb(n, k + 1) / 2**n <= 0.025:
        k += 1
        below += comb(n, k) / 2**n
    return max(0, k)
