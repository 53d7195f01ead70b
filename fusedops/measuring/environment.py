"""Records the machine, the versions and the commit with which something was measured."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from fusedops.backends import cpu_name, version_of
from fusedops.extension import BUILD

__all__ = ["environment", "slug", "versions"]

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


def slug(device: str) -> str:
    """A device name as a folder name: `NVIDIA H200` becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """The CPU's name, and the versions of Python and of the packages that decide over speed."""
    return {
        "device": cpu_name(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
    }


def environment(threads: int, device: torch.device) -> dict:
    """Where, when and with what something was measured, for a JSON file."""
    about = versions() | {
        "threads": threads,
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
