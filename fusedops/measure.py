"""What every measurement needs: statistics of noisy timings, and where they were taken."""

import datetime
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fusedops.backends import cpu_name, version_of

__all__ = ["Ratio", "Spread", "environment", "paired_ratio", "spread"]


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
    return Spread(*(float(q) for q in np.percentile(samples, [50, 10, 90])))


def paired_ratio(base: Sequence[float], other: Sequence[float], resamples: int = 2000) -> Ratio:
    """How many times faster `other` is than `base`: the median of base[i] / other[i].

    Both were measured in the same round i, so what slowed the machine in that round divides out.
    The interval is the percentile bootstrap over rounds, with a fixed seed.
    """
    ratios = np.asarray(base, dtype=float) / np.asarray(other, dtype=float)
    draw = np.random.default_rng(0).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[draw], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def environment(threads: int, device: torch.device) -> dict:
    """Where, when and with what something was measured, for a JSON file."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this tree, `-dirty` when it was changed since; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    here = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None
