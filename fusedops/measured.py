"""Records which devices `fusedops bench` has measured, and reads FUSEDOPS_UNMEASURED.

A file in the cache folder has each device's name, with the version that ran there and the date. The
variable says what runs attention on GPUs where nobody has timed its kernel: torch, or the kernel.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusedops.cache import caches, replace, version

__all__ = ["CHOICES", "check_choice", "choice", "is_measured", "remember", "reminder"]

FILE = "measured.json"
CHOICES = ("torch", "fused")  # who runs a call whose kernel nobody timed on a GPU
VARIABLE = "FUSEDOPS_UNMEASURED"


def check_choice(value: object, what: str) -> None:
    """Raises ValueError unless the value is in CHOICES. what: the value's name in the message."""
    if value not in CHOICES:
        raise ValueError(f"{what} must be 'torch' or 'fused', got {value!r}")


def choice(asked: str) -> str:
    """What FUSEDOPS_UNMEASURED says, else what was asked."""
    return _OVERRIDE or asked


def _read_environment() -> str:
    given = os.environ.get(VARIABLE, "")
    if given:
        check_choice(given, VARIABLE)
    return given


_OVERRIDE = _read_environment()


def remember(device: str, date: str) -> None:
    """Notes that this version was measured on a device. Raises OSError if that cannot be written.

    device: its name, such as "NVIDIA H200". date: in ISO format.
    """
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    devices = _read() | {device: {"fusedops": version(), "date": date}}
    replace(path, json.dumps(devices, indent=1).encode(), 0o644)


def is_measured(device: str) -> bool:
    """Whether `fusedops bench` of this version ran on a device of this name."""
    record = _read().get(device)
    return isinstance(record, dict) and record.get("fusedops") == version()


def reminder(gpus: Iterable[str]) -> list[str]:
    """One line for patch's report if there are GPUs that were not measured. gpus: their names."""
    unknown = [name for name in dict.fromkeys(gpus) if not is_measured(name)]
    if not unknown:
        return []
    return [
        f"not measured on this GPU ({', '.join(unknown)}): "
        "`fusedops bench MODEL --device cuda` compares eager, compiled and patched"
    ]


def _path() -> Path:
    """Raises RuntimeError if there is no cache folder."""
    return caches(os.environ) / FILE


def _read() -> dict[str, Any]:
    """The record of each device; empty if the file is missing or broken, or has no folder."""
    try:
        devices = json.loads(_path().read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    return devices if isinstance(devices, dict) else {}
