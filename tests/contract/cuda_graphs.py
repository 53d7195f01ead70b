"""Captures calls in CUDA graphs, counts launches, and raises errors where the host waits."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def capture(call):
    """A graph of `call`, which ran before on another stream, and the results it will write.

    The proof that nothing synchronises: while a graph is captured that is an error of CUDA's,
    whoever asks for it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def count_launches(call):
    """How many kernels, copies and fills a call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_device for event in profile.events())


class NeverWaits(TorchDispatchMode):
    """Fails if the host reads a value that the device computed."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.WAITS, func
        return func(*args, **(kwargs or {}))
