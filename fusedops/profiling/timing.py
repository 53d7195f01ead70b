"""Statistics of noisy timings, and a record of the machine, versions and commit."""

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fusedops.backends import cpu_name, version_of
from fusedops.extension import BUILD

__all__ = ["Ratio", "Spread", "environment", "paired_ratio", "quantiles", "slug", "spread"]

# nvidia-smi's names. MHz, watts and degrees Celsius.
GPU_STATE = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "highest_sm_clock": "clocks.max.sm",
    "highest_memory_clock": "clocks.max.mem",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}

# Tracked files that do not change what is measured.
NOT_CODE = ("docs/**", "benchmarks/results/**", "**/*.md", "tests/profiling/recorded/**")


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


def quantiles(samples: Sequence[float], *shares: float) -> list[float]:
    """Interpolates linearly between samples. Uses torch, as numpy may be missing."""
    return _float64(samples).quantile(_float64(shares)).tolist()


def _float64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def paired_ratio(base: Sequence[float], other: Sequence[float], resamples: int = 2000) -> Ratio:
    """How many times faster `other` is than `base`: the median of base[i] / other[i].

    Both were measured in the same round i, so a slowdown of the machine in that round cancels out.
    The interval is a percentile bootstrap over rounds, with a fixed seed.
    """
    ratios = _float64(base) / _float64(other)
    random = torch.Generator("cpu").manual_seed(0)
    draw = torch.randint(
        len(ratios), (resamples, len(ratios)), generator=random, device=ratios.device
    )
    low, high = quantiles(ratios[draw].quantile(0.5, dim=1).tolist(), 0.025, 0.975)
    return Ratio(float(ratios.quantile(0.5)), low, high)


def slug(device: str) -> str:
    """A device name as a folder name: `NVIDIA H200` becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def environment(threads: int, device: torch.device) -> dict:
    """Where, when and with what something was measured, for a JSON file."""
    about = {
        "device": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }
    return about if device.type == "cpu" else about | _gpu(device)


def _gpu(device: torch.device) -> dict:
    """GPU details. `kernels` is the CUDA version of our build; None means that Triton runs."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "kernels": BUILD.get("cuda"),
        "triton": version_of("triton"),
        **_gpu_state(str(properties.uuid)),
    }


def _gpu_state(uuid: str) -> dict[str, str | None]:
    """Driver, clocks, power and temperature from nvidia-smi; None if it is missing."""
    query = f"--query-gpu=uuid,{','.join(GPU_STATE.values())}"
    listed = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]) or ""
    line = next((line for line in listed.splitlines() if uuid in line), None)
    if line is None:
        return dict.fromkeys(GPU_STATE)
    return dict(zip(GPU_STATE, line.split(", ")[1:], strict=True))


def _commit() -> str | None:
    """This tree's commit, with `-dirty` if its code has changes.

    Results and pages do not count: a campaign changes them while it measures. Outside a checkout,
    FUSEDOPS_COMMIT can name the commit that was copied there; else None.
    """
    described = _output(["git", "describe", "--always", "--abbrev=12"])
    if described is None:
        return os.environ.get("FUSEDOPS_COMMIT")
    texts = (f":(top,exclude,glob){path}" for path in NOT_CODE)
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no", ":/", *texts])
    return described + "-dirty" * (changed is not None)


def _output(command: list[str]) -> str | None:
    """A command's output, run here; None if it is missing, fails or prints nothing."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None
