"""Reads from NVML the reasons why a GPU's clock is low."""

import importlib
from typing import Any

__all__ = ["slowed_by", "throttle_reasons"]

# Bits of nvmlClocksEventReasons that say that a GPU was slowed down, not that it was idle or that
# someone set its clocks.
REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The reasons among NVML's bits for which a clock was lowered."""
    return tuple(name for bit, name in REASONS.items() if mask & bit)


def slowed_by(uuid: str, nvml: Any = None) -> tuple[str, ...] | None:
    """Why the GPU's clock is lowered now; None if NVML is unavailable.

    uuid: torch's, without "GPU-". nvml: the module pynvml.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  no pynvml, no driver, or a version of its own errors
        return None
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
    except Exception:  # noqa: BLE001  NVMLError, of GPUs that do not say
        return None
    finally:
        nvml.nvmlShutdown()
