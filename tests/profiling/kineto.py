"""Builds small traces as torch.profiler writes them on a machine with a GPU.

The keys and their order are those of traces that torch 2.7 wrote on an H100. Times are
microseconds. An operator's event holds the call that launches a kernel, and both name the kernel by
its correlation.
"""

import gzip
import json

HOST, BACKWARD = 4242, 4301  # the host's threads
COMPUTE, COLLECTIVES, COPIES = 7, 20, 25  # streams of the GPU
ORIGIN = 1_414_456_661_000.0  # where a trace's clock is when it starts


class Trace:
    """Events of steps of equal length, written by `save`."""

    def __init__(self, step: float, steps: int = 8) -> None:
        self.step, self.starts = step, [ORIGIN + number * step for number in range(steps)]
        self.events = [
            {"ph": "M", "name": "process_name", "ts": ORIGIN, "pid": HOST, "tid": 0},
            {"ph": "i", "s": "g", "name": "Record Window End", "ts": ORIGIN, "pid": "", "tid": ""},
        ]
        self.number = 0
        for number, start in enumerate(self.starts):
            name = f"ProfilerStep#{number + 1}"
            self._add(name, "user_annotation", start, step, HOST, {"External id": self._next()})
            self._add(name, "gpu_user_annotation", start, step, COMPUTE, {}, pid=0)

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _add(self, name, category, start, lasts, thread, args, pid=HOST) -> None:
        about = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread}
        self.events.append(about | {"ts": start, "dur": lasts, "args": args})

    def op(self, name, start, lasts, thread=HOST) -> None:
        """An operator, without what it launches."""
        args = {"External id": self._next(), "Record function id": 0, "Ev Idx": self.number}
        self._add(name, "cpu_op", start, lasts, thread, args)

    def runtime(self, name, start, lasts, thread=HOST) -> int:
        """A call of the CUDA runtime; returns its correlation."""
        correlation = 50_000 + self._next()
        args = {"cbid": 211, "correlation": correlation}
        self._add(name, "cuda_runtime", start, lasts, thread, args)
        return correlation

    def work(self, name, start, lasts, correlation, stream=COMPUTE, category="kernel", **args):
        about = {"device": 0, "context": 1, "stream": stream, "correlation": correlation}
        self._add(name, category, start, lasts, stream, about | args, pid=0)

    def launch(self, op, called, name, start, lasts, thread=HOST, stream=COMPUTE) -> None:
        """An operator that launches a kernel, which starts when the GPU gets there."""
        self.op(op, called, 3.0, thread)
        correlation = self.runtime("cudaLaunchKernel", called + 1, 1.5, thread)
        self.work(name, start, lasts, correlation, stream)

    def copy(self, kind, called, start, lasts, size, stream=COMPUTE) -> None:
        """kind: such as `HtoD (Pinned -> Device)`."""
        self.op("aten::copy_", called, 6.0)
        correlation = self.runtime("cudaMemcpyAsync", called + 1, 4.0)
        about = {"bytes": size, "memory bandwidth (GB/s)": size / lasts / 1e3}
        self.work(f"Memcpy {kind}", start, lasts, correlation, stream, "gpu_memcpy", **about)

    def wait(self, start, lasts, op="", name="cudaStreamSynchronize", python="") -> None:
        """The host waits for the GPU. python: the function, where stacks are recorded."""
        if python:
            self._add(python, "python_function", start - 20, lasts + 40, HOST, {"Python id": 1})
            inside = "<built-in method item of Tensor object>"
            self._add(inside, "python_function", start - 8, lasts + 9, HOST, {"Python id": 2})
        if op:
            self.op(op, start - 5, lasts + 6)
        self.runtime(name, start, lasts)

    def fetch(self, start, lasts) -> None:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self._add(name, "user_annotation", start, lasts, HOST, {"External id": self._next()})

    def save(self, path):
        """Each step ends with the wait of the loop that profiles."""
        for start in self.starts:
            self.runtime("cudaDeviceSynchronize", start + self.step - 12, 8)
        about = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
        text = json.dumps(about | {"traceEvents": self.events})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path


def launch_gaps() -> Trace:
    """Kernels of 4 us every 10 us: the GPU is busy for 40 % and waits for launches."""
    trace = Trace(1_000.0)
    for start in trace.starts:
        trace.fetch(start, 2)
        for at in range(10, 980, 10):
            trace.launch("aten::add", start + at - 6, "vectorized_elementwise", start + at, 4)
    return trace


def sync_a_step() -> Trace:
    """In each step `.item()` drains the queue, and the GPU is idle for 3 ms until the host is back.

    A second one, of 10 us, reads the loss at the end.
    """
    trace = Trace(10_000.0)
    for start in trace.starts:
        trace.fetch(start, 5)
        trace.launch("aten::mm", start + 20, "sm90_xmma_gemm_bf16", start + 30, 2_970)
        trace.wait(start + 100, 2_900, "aten::item", python="train.py(12): step")
        trace.launch("aten::mm", start + 5_990, "sm90_xmma_gemm_bf16", start + 6_000, 3_900)
        trace.wait(start + 9_890, 10, "aten::item")
    return trace


def exposed_collectives() -> Trace:
    """4 ms of nccl, of which a product overlaps one."""
    trace = Trace(10_000.0)
    for start in trace.starts:
        trace.launch("aten::mm", start + 5, "sm90_xmma_gemm_bf16", start + 15, 4_985)
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        trace.launch("c10d::allreduce_", start + 20, name, start + 4_000, 4_000, stream=COLLECTIVES)
        trace.launch("aten::mm", start + 30, "sm90_xmma_gemm_bf16", start + 8_000, 1_980)
    return trace


def mallocs_in_steady_state() -> Trace:
    """Two calls of cudaMalloc in each step, during which the GPU runs dry."""
    trace = Trace(10_000.0)
    for start in trace.starts:
        trace.launch("aten::mm", start + 5, "sm90_xmma_gemm_bf16", start + 15, 4_985)
        for at in (5_100, 7_000):
            trace.op("aten::empty", start + at - 5, 1_310)
            trace.runtime("cudaMalloc", start + at, 1_300)
        trace.launch("aten::mm", start + 8_990, "sm90_xmma_gemm_bf16", start + 9_000, 980)
    return trace


def input_wait() -> Trace:
    """A batch after 7 ms, whose pageable copy and short kernels take the rest."""
    trace = Trace(10_000.0)
    for start in trace.starts:
        trace.fetch(start, 7_000)
        trace.copy("HtoD (Pageable -> Device)", start + 7_005, start + 7_010, 400, 6_000_000)
        trace.copy("HtoD (Pinned -> Device)", start + 7_450, start + 7_455, 45, 2_000_000, COPIES)
        for at in range(7_500, 9_980, 10):
            trace.launch("aten::add", start + at - 6, "vectorized_elementwise", start + at, 9)
    return trace
