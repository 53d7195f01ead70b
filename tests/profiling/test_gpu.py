"""The profiler's GPU statistics from synthetic traces, the allocator's counters and NVML."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch

from fusedops.measuring.memory.allocations import held_at, peak_of
from fusedops.measuring.memory.profiled import MARK, Marks, allocations_of
from fusedops.profiling.collect.gpu.allocator import allocations
from fusedops.profiling.collect.gpu.kernels import device_times
from fusedops.profiling.collect.gpu.watched import (
    slowed_by,
    synchronizing_lines,
    throttle_reasons,
)
from fusedops.profiling.collect.kineto import read_events
from fusedops.profiling.collect.trace import gpu_of, named, read_trace, work_of
from fusedops.profiling.evidence import Copies, Evidence, Run
from fusedops.profiling.judge import judge
from fusedops.profiling.report import Profile
from profiling.driver import STATS, Cuda
from profiling.kineto import (
    BACKWARD,
    Trace,
    exposed_collectives,
    input_wait,
    launch_gaps,
    mallocs_in_steady_state,
    sync_a_step,
)
from profiling.synthetic import gpu_step, matmul

MS = 1e-3


def events_of(trace, folder):
    return read_events(trace.save(folder / "trace.json"))


def plain(seconds, wait=0.0, synced=0.0, steps=20):
    return Run((seconds,) * steps, wait=(wait,) * steps, synced=(synced,) * steps)


# From a trace file alone.

TRACES = {
    "launch": (launch_gaps, 0.6),
    "sync": (sync_a_step, 0.3),
    "communication": (exposed_collectives, 0.3),
    "allocation": (mallocs_in_steady_state, 0.26),
    "input": (input_wait, 0.7),
}


@pytest.mark.parametrize("bound", TRACES)
def test_a_trace_alone_gives_the_bound(bound, tmp_path):
    build, share = TRACES[bound]
    evidence = read_trace(build().save(tmp_path / "trace.json.gz"))
    verdict = judge(evidence)
    assert verdict.bounds == (bound,) and verdict.share[1] == pytest.approx(share, abs=0.02)
    assert evidence.plain.seconds[0] == pytest.approx(10 * MS if bound != "launch" else MS)


def test_a_wait_that_the_gpu_works_through_is_not_input(tmp_path):
    """The host waits for the next batch while the GPU computes. Nothing else says what limits."""
    trace = Trace(10_000.0)
    for start in trace.starts:
        trace.fetch(start + 100, 7_000)
        trace.launch("aten::mm", start + 5, "gemm", start + 10, 9_900)
    verdict = judge(read_trace(trace.save(tmp_path / "trace.json")))
    assert verdict.shares["input"] == (0, 0, 0)
    assert verdict.bounds == ("unknown",) and verdict.shares["unknown"][1] > 0.98


def test_idle_time_alone_is_not_launch(tmp_path):
    """Without a DataLoader in the trace, the GPU may have waited for data."""
    trace = launch_gaps()
    trace.events = [e for e in trace.events if "DataLoader" not in e["name"]]
    verdict = judge(read_trace(trace.save(tmp_path / "trace.json")))
    assert verdict.bounds == ("unknown",) and verdict.shares["launch"] == (0, 0, 0)
    assert "input: the trace has no DataLoader, so idle time may be a wait for data" in (
        verdict.not_checked
    )


def test_other_files_are_refused(tmp_path):
    path, trace = tmp_path / "trace.json", Trace(1_000.0)
    for text, message in (
        ("[1]", r"must be a trace of torch\.profiler"),
        ('{"traceEvents": []}', "has no ProfilerStep"),
        (trace.save(path).read_text(), "has no kernel of a GPU"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)


# From a trace with steps that were timed without the profiler.

# Trace, the step without the profiler, its wait for data, the host's wait at its end: the share.
LIVE = {
    "launch": (launch_gaps, plain(0.8 * MS, synced=0.01 * MS), 1 - 0.388 / 0.8),
    "sync": (sync_a_step, plain(9 * MS, synced=2 * MS), 3 / 9 * 2.12 / 3.12),
    "communication": (exposed_collectives, plain(10 * MS, synced=5 * MS), 0.3),
    "allocation": (mallocs_in_steady_state, plain(9 * MS, synced=1 * MS), 2.6 / 9),
    "input": (input_wait, plain(9 * MS, wait=6 * MS), 6 / 9),
}


def live_evidence(build, run, folder, **more):
    work = work_of(events_of(build(), folder))
    return Evidence(plain=run, gpu=gpu_of(work, run, **more), device="cuda")


@pytest.mark.parametrize("bound", LIVE)
def test_the_step_without_a_profiler_decides_the_share(bound, tmp_path):
    build, run, share = LIVE[bound]
    verdict = judge(live_evidence(build, run, tmp_path))
    assert verdict.bounds == (bound,) and verdict.share[1] == pytest.approx(share, abs=0.01)


def test_idle_time_shrinks_with_the_profiler_and_work_does_not(tmp_path):
    run = plain(9 * MS, synced=2 * MS)
    gpu = live_evidence(sync_a_step, run, tmp_path, lines=("train.py:12", "train.py:30")).gpu
    assert gpu.busy == pytest.approx(6.87 / 9)
    where, seconds = gpu.syncs[0].where, gpu.syncs[0].gap
    idle = (9 - 6.87) / (10 - 6.87)
    assert where == "train.py:12" and seconds == pytest.approx(3 * MS * idle)
    assert gpu.host_waits == pytest.approx((2 + 2.91) / 9)
    assert [sync.where for sync in gpu.syncs] == ["train.py:12", "train.py:30"]
    assert gpu.kernels == 2 and not gpu.slowed_by


def test_waits_without_their_lines_keep_their_operators(tmp_path):
    """Of a step that also waits where torch's mode does not see it, and without stacks."""
    trace = sync_a_step()
    trace.events = [e for e in trace.events if e.get("cat") != "python_function"]
    waits = work_of(events_of(trace, tmp_path)).waits
    assert [w.where for w in waits[0]] == ["aten::item", "aten::item"]
    assert named(waits, ["train.py:12"]) == [list(step_waits) for step_waits in waits]
    lines = [w.where for w in named(waits, ["train.py:12", "train.py:30"])[0]]
    assert lines == ["train.py:12", "train.py:30"]


def test_copies_by_the_hosts_memory(tmp_path):
    gpu = live_evidence(input_wait, plain(9 * MS, wait=6 * MS), tmp_path).gpu
    assert gpu.copies == Copies(2_000_000, 6_000_000, pytest.approx(0.445 * MS))
    text = str(Profile(Evidence(plain=plain(9 * MS, wait=6 * MS), gpu=gpu, device="cuda")))
    assert "1.91 MiB pinned, 5.72 MiB pageable" in text
    assert "a step copies 5.72 MiB from memory that is not pinned" in text


def test_an_overlapped_copy_is_not_exposed(tmp_path):
    trace = Trace(1_000.0)
    for start in trace.starts:
        trace.launch("aten::mm", start + 5, "gemm", start + 10, 900)
        trace.copy("HtoD (Pinned -> Device)", start + 20, start + 30, 100, 4096, stream=25)
    assert work_of(events_of(trace, tmp_path)).copies == Copies(4096, 0, 0.0)


# Operators.


def test_a_kernel_belongs_to_the_recorded_operator_that_launched_it(tmp_path):
    trace = Trace(1_000.0, steps=2)
    for start in trace.starts:
        trace.op("aten::linear", start + 10, 50)  # not recorded: it is made of addmm
        trace.op("aten::addmm", start + 12, 40)
        trace.op("aten::copy_", start + 14, 10)  # recorded, but inside of one that is
        trace.work("copy", start + 30, 5, trace.runtime("cudaLaunchKernel", start + 15, 2))
        trace.work("gemm", start + 40, 20, trace.runtime("cuLaunchKernel", start + 30, 2))
        trace.op("aten::view", start + 70, 1)
        trace.launch("aten::mm", start + 100, "late", start + 700, 100, thread=BACKWARD)
        trace.launch("aten::addmm", start + 101, "gemm", start + 300, 30)
        trace.launch("aten::mm", start + 110, "later", start + 2_100, 7, thread=BACKWARD)
        trace.launch("c10d::allreduce_", start + 120, "ncclDevKernel_AllReduce", start + 330, 50)
        trace.launch("aten::unknown", start + 130, "fill", start + 400, 3)
        trace.work("launched before the trace", start + 1, 9, 123)
    names = ["aten::addmm", "aten::copy_", "aten::mm", "aten::view", "c10d::allreduce_"]
    for times in device_times(events_of(trace, tmp_path), names):
        us = {
            name: [round(seconds * 1e6, 6) for seconds, _ in calls] for name, calls in times.items()
        }
        assert us == {
            "aten::addmm": [25, 30],
            "aten::mm": [100, 7],  # the last runs in a later step, which did not launch it
            "aten::view": [0],
            "c10d::allreduce_": [0],
        }


def test_kernels_of_no_operator_are_unexplained():
    """The GPU works for 9 ms. A product at the ceiling explains 3 ms of it."""
    shares = judge(gpu_step(ops=[matmul(3 * MS)])).shares
    assert shares["compute"][1] == pytest.approx(0.27, abs=0.005)
    assert shares["unknown"][1] == pytest.approx(0.7, abs=0.005)


def test_a_kernels_time_is_not_scaled_and_has_no_launch():
    step = gpu_step(length=20 * MS, ops=[matmul(9 * MS, efficiency=0.4)])
    slow = replace(step.profiled, seconds=(30 * MS,) * 3)  # the profiler's step
    (row,) = Profile(replace(step, profiled=slow)).ops
    assert row.seconds == pytest.approx(9 * MS) and row.share == pytest.approx(0.45, abs=0.01)
    assert row.bound == "kernels"
    tiny = replace(step.profiled.ops[0], flops=0, traffic=((2**20, 4),), calls=2000)
    (row,) = Profile(replace(step, profiled=replace(slow, ops=(tiny,)))).ops
    assert row.bound == "kernels"  # on a CPU 2000 calls of 2 us would be launches


# The allocator, waits, clocks.


def test_mallocs_are_the_allocators_where_it_counts_them(tmp_path):
    later = STATS | {"num_device_alloc": 14, "num_alloc_retries": 2}
    run = LIVE["allocation"][1]
    evidence = live_evidence(mallocs_in_steady_state, run, tmp_path).gpu
    assert evidence.mallocs == 2 and evidence.reserved is None
    counted = allocations(STATS, later, 4)
    evidence = live_evidence(mallocs_in_steady_state, run, tmp_path, allocated=counted)
    assert (evidence.gpu.mallocs, evidence.gpu.alloc_retries) == (1, 0.25)
    assert "1 cudaMalloc and 0.25 retries a step" in judge(evidence).evidence


@pytest.mark.parametrize("raises", [False, True])
def test_lines_that_wait_are_found_and_the_mode_is_put_back(raises):
    cuda = Cuda(mode=0)

    def step():
        warnings.warn("another warning", stacklevel=1)
        cuda.wait()
        for _ in range(2):
            cuda.wait()
        if raises:
            raise ValueError("the step")

    first = step.__code__.co_firstlineno
    if raises:
        with pytest.raises(ValueError, match="the step"):
            synchronizing_lines(step, cuda)
    else:
        lines = synchronizing_lines(step, cuda)
        assert lines == [f"test_gpu.py:{first + n}" for n in (2, 4, 4)]
    assert cuda.modes == ["warn", 0] and cuda.mode == 0


class Nvml:
    """pynvml, for a GPU that says these reasons; None raises as it does for older GPUs."""

    def __init__(self, mask):
        self.mask, self.open = mask, 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return "device"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        assert device == "device"
        if self.mask is None:
            raise RuntimeError("Not Supported")
        return self.mask


def test_reasons_for_a_lowered_clock(monkeypatch):
    assert throttle_reasons(0x1 | 0x2) == ()  # idle, and clocks that someone set
    assert throttle_reasons(0x4 | 0x20) == ("power limit", "temperature (software)")
    nvml = Nvml(0x48)
    assert slowed_by("1234", nvml) == ("hardware slowdown", "temperature (hardware)")
    assert slowed_by("1234", Nvml(None)) is None and nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert slowed_by("1234") is None


def test_a_lowered_clock_is_in_the_evidence(tmp_path):
    slow = live_evidence(launch_gaps, LIVE["launch"][1], tmp_path, slowed_by=("power limit",))
    assert slow.gpu.slowed_by and "the GPU's clock is lowered: power limit" in judge(slow).evidence
    usual = live_evidence(launch_gaps, LIVE["launch"][1], tmp_path, slowed_by=())
    assert not usual.gpu.slowed_by and not any("clock" in line for line in judge(usual).evidence)


# Memory.


def memory(time, address, size, device=1, index=0):
    args = {"Addr": address, "Bytes": size, "Device Type": device, "Device Id": index}
    return {"name": "[memory]", "ts": time, "args": args}


def test_allocations_of_a_device_are_told_from_others_at_the_same_address():
    marks = Marks(torch.device("cuda", 0))
    marks.notes = [(64, 512, "parameters", "layer"), (128, 1024, "activations", "layer")]
    events = [
        memory(1, 128, 1024),
        memory(2, 128, 7777, device=0, index=-1),  # the CPU's
        memory(2, 128, 5555, index=1),  # another GPU's
        {"name": f"{MARK}0", "ts": 3, "args": {}},
        {"name": f"{MARK}1", "ts": 3, "args": {}},
        memory(4, 256, 2048),
        memory(5, 256, -2048),
        memory(6, 128, -1024),
    ]
    allocations = list(allocations_of(events, marks, {}))
    time, peak = peak_of(allocations)
    assert peak == 512 + 1024 + 2048
    held = {name: size for name, size in held_at(allocations, time).items() if size}
    assert held == {"parameters": 512, "activations": 1024, "temporaries": 2048}
    unmarked = [event for event in events if event["name"] == "[memory]"]
    (on_cpu,) = allocations_of(unmarked, Marks(), {})
    assert (on_cpu.bytes, on_cpu.start, on_cpu.end) == (7777, 2, float("inf"))
