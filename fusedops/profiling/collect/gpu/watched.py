"""Runs steps under torch.profiler and finds waits; reads a GPU's clocks."""

import importlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, schedule

from fusedops.measuring.driver import Driver
from fusedops.profiling.collect.kineto import Event, read_events

__all__ = ["STEPS", "slowed_by", "synchronizing_lines", "throttle_reasons", "traced"]

STEPS = 4  # after one in which the profiler starts
WARNING = "called a synchronizing CUDA operation"  # begins what torch says in its mode for waits

# Bits of nvmlClocksEventReasons that say that a GPU was slowed down, not that it was idle or that
# someone set its clocks.
REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def traced(
    call: Callable[[], Any], driver: Driver, while_busy: Callable[[], Any] = lambda: None
) -> list[Event]:
    """Traces a few steps. The host waits for the GPU at the end of each.

    while_busy: called in the last step, before that wait.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr when it starts
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "trace.json"))
        with driver.profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
        ) as profiler:
            for step in range(1 + STEPS):
                call()
                if step == STEPS:
                    while_busy()
                driver.synchronize()
                profiler.step()
        return read_events(path)


def synchronizing_lines(call: Callable[[], Any], cuda: Any) -> list[str]:
    """`train.py:12` of each wait of a step, in order; torch's mode that warns of them is put back.

    torch sees neither collectives nor `torch.cuda.synchronize`.
    """
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            cuda.set_sync_debug_mode(before)
    return [
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if str(warning.message).startswith(WARNING)
    ]


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
