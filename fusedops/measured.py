"""Records which devices `fusedops bench` has measured.

A file in the cache folder has each device's name, with the version that ran there and the date.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fusedops.cache import caches, replace, version

__all__ = ["is_measured", "remember", "reminder"]

FILE = "measured.json"


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
