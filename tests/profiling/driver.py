"""A fake `torch.cuda` that uses the CPU, and a profiler that adds invented GPU kernels.

They stand in for `torch.cuda` and for what CUPTI adds to torch.profiler's trace, so that all of our
code runs without a GPU.
"""

import json
import warnings
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import torch

STATS = {
    "allocation.all.allocated": 1000,
    "num_device_alloc": 10,
    "segment.all.allocated": 7,
    "num_alloc_retries": 1,
    "allocated_bytes.all.current": 100,
    "allocated_bytes.all.peak": 900,
    "reserved_bytes.all.current": 400,
}


class Cuda:
    """A driver whose device is the CPU: a call is done when the host comes back from it."""

    def __init__(self, mode=0):
        self.mode, self.modes = mode, []
        self.synchronized = self.tensors = 0

    def is_initialized(self):
        return True

    def Event(self, enable_timing):
        assert enable_timing
        return Recorded()

    def current_stream(self, index):
        return None

    def synchronize(self, index):
        self.synchronized += 1

    def memory_stats(self, index):
        return STATS | {"allocation.all.allocated": self.tensors}

    def device_count(self):
        return 1

    def get_device_properties(self, index):
        return SimpleNamespace(name="A GPU", uuid="1234")

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.modes.append(mode)
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def wait(self):
        """What `.item()` of a tensor on a GPU does."""
        if self.mode:
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally)", stacklevel=2
            )


class Recorded:
    def record(self, stream):
        self.at = perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Profiler(torch.profiler.profile):
    """torch.profiler with the events that CUPTI adds: each innermost operator launches a kernel."""

    def export_chrome_trace(self, path):
        super().export_chrome_trace(path)
        content = json.loads(Path(path).read_text())
        content["traceEvents"] += [*kernels_of(content["traceEvents"])]
        Path(path).write_text(json.dumps(content))


def kernels_of(events):
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    for number, op in enumerate(ops):
        start, end = op["ts"], op["ts"] + op["dur"]
        inside = [o for o in ops if o is not op and start <= o["ts"] and o["ts"] + o["dur"] <= end]
        if inside or not op["name"].startswith("aten::"):
            continue
        about = {"ph": "X", "pid": op["pid"], "tid": op["tid"], "ts": start, "dur": op["dur"] / 4}
        yield about | {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "args": {"correlation": number},
        }
        args = {"correlation": number, "stream": 7, "device": 0}
        yield {"ph": "X", "pid": 0, "tid": 7, "ts": start, "dur": op["dur"], "args": args} | {
            "cat": "kernel",
            "name": f"{op['name']}_kernel",
        }
