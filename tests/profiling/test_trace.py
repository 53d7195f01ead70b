"""The profiler finds in a saved torch.profiler trace how long the GPU is idle, and why."""

import gzip
import json

import pytest
import torch

from fusedops.profiling.collect.trace import read_trace
from fusedops.profiling.judge import judge
from fusedops.profiling.report import Profile

STEP = 10_000  # microseconds
STEPS = 8


def event(name, category, start, length, **args):
    about = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}
    return about | {"pid": 1, "tid": 1, "args": args}


def trace(path, step):
    """Writes a trace of steps; `step(start)` gives the events of one."""
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    for number in range(STEPS):
        start = 1_000_000 + number * STEP
        events.append(event(f"ProfilerStep#{number}", "user_annotation", start, STEP))
        events.append(event(f"ProfilerStep#{number}", "gpu_user_annotation", start, STEP))
        events += step(start)
        events.append(event("cudaDeviceSynchronize", "cuda_runtime", start + STEP - 10, 5))
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def launches(start):
    """A kernel of 4 us each 10 us: the GPU is busy for 40 % and waits for launches."""
    kernels = [event("add_kernel", "kernel", start + at, 4, stream=7) for at in range(0, STEP, 10)]
    return [fetch(start, 1), *kernels]


def fetch(start, length):
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    return event(name, "user_annotation", start, length)


def starved(start):
    """A batch after 7 ms, then short kernels."""
    kernels = [event("k", "kernel", start + 7_000 + at, 8) for at in range(0, 3_000, 10)]
    return [fetch(start, 7_000), *kernels]


def prefetched(start):
    """The host waits for the next batch while the GPU computes."""
    return [fetch(start, 7_000), event("gemm", "kernel", start, 9_900)]


def unseen(start):
    """Short kernels, and nothing that says why the GPU is idle."""
    return launches(start)[1:]


def syncs(start):
    """Two kernels with a wait of the host between them, after which nothing runs for 3 ms."""
    return [
        event("gemm", "kernel", start, 3_000),
        event("train.py(12): step", "python_function", start, STEP),
        event("torch/nn/modules/module.py(1): _call", "python_function", start + 1, STEP - 2),
        event("aten::item", "cpu_op", start + 90, 2_950),
        event("cudaStreamSynchronize", "cuda_runtime", start + 100, 2_900),
        event("gemm", "kernel", start + 6_000, 4_000),
    ]


def collectives(start):
    """nccl runs for 4 ms. A gemm overlaps 1 ms of it."""
    return [
        event("gemm", "kernel", start, 5_000, stream=7),
        event("ncclDevKernel_AllReduce", "kernel", start + 4_000, 4_000, stream=20),
        event("gemm", "kernel", start + 8_000, 2_000, stream=7),
    ]


def mallocs(start):
    waits = [event("cudaMalloc", "cuda_runtime", start + at, 1_000) for at in (5_000, 7_000)]
    return [
        event("gemm", "kernel", start, 5_000),
        event("gemm", "kernel", start + 9_000, 1_000),
        *waits,
    ]


def busy(start):
    return [event("gemm", "kernel", start, 9_900)]


CASES = {
    "input": (starved, 0.7),
    "launch": (launches, 0.6),
    "sync": (syncs, 0.3),
    "communication": (collectives, 0.3),
    "allocation": (mallocs, 0.2),
}


@pytest.mark.parametrize("ending", ["json", "json.gz"])
@pytest.mark.parametrize("bound", CASES)
def test_bounds(bound, ending, tmp_path):
    step, share = CASES[bound]
    verdict = judge(read_trace(trace(tmp_path / f"trace.{ending}", step)))
    assert verdict.bounds == (bound,)
    assert verdict.share[1] == pytest.approx(share, abs=0.005)


def test_a_wait_that_the_gpu_works_through_is_not_input(tmp_path):
    verdict = judge(read_trace(trace(tmp_path / "trace.json", prefetched)))
    assert verdict.shares["input"] == (0, 0, 0)


def test_idle_time_alone_is_not_launch(tmp_path):
    """Without a DataLoader in the trace, the GPU may have waited for data."""
    verdict = judge(read_trace(trace(tmp_path / "trace.json", unseen)))
    assert verdict.bounds == ("unknown",) and verdict.shares["launch"] == (0, 0, 0)
    assert "input: the trace has no DataLoader, so idle time may be a wait for data" in (
        verdict.not_checked
    )


def test_a_busy_gpu_has_none_of_them(tmp_path):
    verdict = judge(read_trace(trace(tmp_path / "trace.json", busy)))
    assert verdict.bounds == ("unknown",) and verdict.shares["unknown"][1] > 0.98


def test_numbers(tmp_path):
    gpu = read_trace(trace(tmp_path / "trace.json", launches)).gpu
    assert (gpu.kernels, gpu.busy) == (1000, pytest.approx(0.4, abs=1e-3))
    assert gpu.median_kernel == pytest.approx(4e-6)
    waits = read_trace(trace(tmp_path / "trace.json", syncs))
    (sync,) = waits.gpu.syncs
    assert sync.where == "train.py(12): step" and sync.gap == pytest.approx(3e-3)
    assert waits.plain.seconds == (0.01,) * STEPS
    assert "train.py(12): step" in str(Profile(waits))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"must be a trace of torch\.profiler"):
        read_trace(path)
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="has no ProfilerStep"):
        read_trace(path)
    path.write_text(json.dumps({"traceEvents": [event("ProfilerStep#1", "user_annotation", 0, 9)]}))
    with pytest.raises(ValueError, match="has no kernel of a GPU"):
        read_trace(path)


def test_a_real_trace_of_a_cpu_has_steps_but_no_kernel(tmp_path):
    cpu = torch.profiler.ProfilerActivity.CPU
    schedule = torch.profiler.schedule(wait=0, warmup=0, active=3)
    with torch.profiler.profile(activities=[cpu], schedule=schedule) as profiler:
        for _ in range(3):
            torch.ones(8).sum()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(ValueError, match="has no kernel of a GPU"):
        read_trace(tmp_path / "trace.json")
