"""The clocks of a GPU, by the names that cases call them.

`device`: the device's time over a cold L2, between two events. For rows that move data; two sets of
inputs take turns (benchmarks/harness/run.py), so that no call finds what the one before it read.
`graph`: the device's time in a replayed graph, where no host is waited for. For few tokens.
`host`: the host's time to enqueue a call. What a small batch costs in eager code.

`python -m benchmarks.harness.cuda` prints what to compile for, before anything is compiled.
"""

import functools
import math
from time import perf_counter

import torch
from torch.cuda import Event

from benchmarks.harness.memory import Memory, nbytes
from benchmarks.harness.timing import Call, Machine, Stopwatch

IN_GRAPH = 32  # calls in one graph: long against the launch of its replay
IN_QUEUE = 32  # calls until the host waits; at some 1000 launches the driver makes it wait


def require() -> None:
    """Raises SystemExit where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a GPU: torch {torch.__version__} finds no CUDA device")


def architecture() -> str:
    """The current GPU in TORCH_CUDA_ARCH_LIST's words, with what only it has: 9.0a, 8.6."""
    require()
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def machine() -> Machine:
    """The current CUDA device."""
    require()
    clocks = {"device": device, "graph": graph, "host": host}
    return Machine(torch.device("cuda"), clocks, launches, memory)


def device(call: Call) -> Stopwatch:
    """Between two events. Before the first the L2 is flushed, so often that the host is ahead.

    The interval then holds neither a warm cache nor the host's time to enqueue the call.
    """
    call()
    flushes = flushes_before(call)

    def seconds(repeats: int) -> float:
        pairs = [(Event(enable_timing=True), Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            for _ in range(flushes):
                _flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / repeats

    return seconds


def graph(call: Call) -> Stopwatch:
    """In a graph of `IN_GRAPH` calls, which is replayed as one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first calls set up must not be captured
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(IN_GRAPH):
            call()
    return lambda repeats: _elapsed_s(captured.replay, repeats) / IN_GRAPH


def host(call: Call) -> Stopwatch:
    """Until the call returns, with a queue that never fills, after one untimed call."""

    def seconds(repeats: int) -> float:
        call()
        total = 0.0
        for first in range(0, repeats, IN_QUEUE):
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(min(IN_QUEUE, repeats - first)):
                call()
            total += perf_counter() - start
        torch.cuda.synchronize()
        return total / repeats

    return seconds


def launches(call: Call) -> int:
    """How many kernels, copies and fills a call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_device for event in profile.events())


def memory(call: Call) -> Memory:
    """Of a call, by the caching allocator; an untimed one has set up what stays."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    return Memory(torch.cuda.max_memory_allocated() - before, nbytes(results))


def flushes_before(call: Call) -> int:
    """Until the host is ahead by twice what it needs to enqueue the call, and one for the L2."""
    return 1 + math.ceil(2 * host(call)(IN_QUEUE) / _lead_s())


def _elapsed_s(call: Call, repeats: int) -> float:
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _flush() -> None:
    """Reads twice the L2's size: lines that were written would have to be written back later."""
    _twice_l2().sum()


@functools.cache
def _twice_l2() -> torch.Tensor:
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    return torch.rand(size // 4, device="cuda")


@functools.cache
def _lead_s() -> float:
    """By how much a flush puts the host ahead: the device's time less the host's to enqueue it."""
    _flush()
    device_s, host_s = _elapsed_s(_flush, IN_QUEUE), host(_flush)(IN_QUEUE)
    if device_s < 1.1 * host_s:
        raise RuntimeError(
            f"flushing the L2 takes the device {device_s * 1e6:.0f} us and the host "
            f"{host_s * 1e6:.0f} us: no call can be timed apart from the host"
        )
    return device_s - host_s


if __name__ == "__main__":
    print(architecture())
