"""Measures calls on a GPU: device, graph and host time.

`device`: device time with a cold L2 cache, between two events, for rows that move data. Two sets of
inputs alternate (benchmarks/harness/run.py), so that no call finds the previous call's data in a
cache. `graph`: device time in a replayed graph, which does not wait for the host, for few tokens.
`host`: host time to enqueue a call, which is the cost of a small batch in eager code.
"""

import functools
import math
from time import perf_counter

import torch
from torch.cuda import Event

from benchmarks.harness.timing import Call, Machine, Stopwatch

IN_GRAPH = 32  # calls per graph, to make it long compared with its launch
IN_QUEUE = 32  # calls until the host waits; at about 1000 launches the driver makes it wait


def require() -> None:
    """Raises SystemExit if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a GPU: torch {torch.__version__} finds no CUDA device")


def machine() -> Machine:
    """Returns the current CUDA device with its clocks."""
    require()
    clocks = {"device": device, "graph": graph, "host": host}
    return Machine(torch.device("cuda"), clocks, lost)


def lost() -> str | None:
    """Why this process can no longer use the device; None if it can.

    After an illegal access and errors like it, every call of CUDA in the process raises.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def device(call: Call) -> Stopwatch:
    """Time between two events. The L2 is flushed before the first, to let the host run ahead.

    So the interval contains neither a warm cache nor the host's time to enqueue the call.
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
    """Time in a graph of `IN_GRAPH` calls, replayed as one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first calls' setup must not be captured
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(IN_GRAPH):
            call()
    return lambda repeats: _elapsed_s(captured.replay, repeats) / IN_GRAPH


def host(call: Call) -> Stopwatch:
    """Time until the call returns, with a queue that never fills, after one untimed call."""

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


def flushes_before(call: Call) -> int:
    """Flushes until the host is ahead by twice a call's enqueueing time; one more for L2."""
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
    """Reads twice the L2's size; written lines would have to be written back later."""
    _twice_l2().sum()


@functools.cache
def _twice_l2() -> torch.Tensor:
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    return torch.rand(size // 4, device="cuda")


@functools.cache
def _lead_s() -> float:
    """Returns how far one flush puts the host ahead: its device time minus its enqueueing time."""
    _flush()
    device_s, host_s = _elapsed_s(_flush, IN_QUEUE), host(_flush)(IN_QUEUE)
    if device_s < 1.1 * host_s:
        raise RuntimeError(
            f"flushing the L2 takes the device {device_s * 1e6:.0f} us and the host "
            f"{host_s * 1e6:.0f} us: no call can be timed apart from the host"
        )
    return device_s - host_s
