"""Runs steps under torch.profiler with the GPU's activity, and reads the trace."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, schedule

from fusedops.measuring.driver import Driver
from fusedops.profiling.collect.kineto import Event, read_events

__all__ = ["STEPS", "traced"]

STEPS = 4  # after one in which the profiler starts


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
