"""Builds profiler measurements (`Evidence`) of invented steps whose parts have known durations."""

from dataclasses import replace
from random import Random

from fusedops.profiling.evidence import Ceilings, Evidence, Gpu, Op, Profiled, Run

MS = 1e-3
STEPS = 20

CEILINGS = Ceilings(
    copy=((2**17, 60e9), (2**20, 40e9), (2**22, 30e9), (2**25, 15e9), (2**27, 10e9)),
    flops={"float32": 100e9, "bfloat16": 200e9},
    op_seconds=2e-6,
    fault_seconds=0.5e-6,
    event_seconds=1e-6,
)


def run(step, wait=0.0, jitter=0.02, seed=0, steps=STEPS, stopped=0.0, preempted=0.0, **counters):
    """Steps of this length that vary, alike for the same seed.

    stopped: seconds of a step in which the thread does not run; `preempted` of these because other
    threads have the CPUs.
    """
    random = Random(seed)
    lengths = [step * (1 + jitter * random.uniform(-1, 1)) for _ in range(steps)]
    return Run(
        seconds=tuple(length + wait for length in lengths),
        wait=(wait,) * steps,
        preempted=(preempted,) * steps,
        forward=(0.0,) * steps,
        optimizer=(0.0,) * steps,
        cpu=tuple(length - stopped for length in lengths),
        **({"user": sum(lengths), "system": 0.0, "paired": True} | counters),
    )


def op(name="aten::mm", seconds=0.0, calls=1, flops=0, size=0, distance=2**27, **fields):
    """An operator whose calls take `seconds` in each of three profiled steps."""
    traffic = ((distance, size),) if size else ()
    about = {"shapes": "[8, 8]", "dtype": "float32", "module": "", "events": calls} | fields
    return Op(name, calls=calls, flops=flops, traffic=traffic, seconds=(seconds,) * 3, **about)


def matmul(seconds, efficiency=0.9):
    return op("aten::mm", seconds, flops=round(efficiency * seconds * CEILINGS.flops["float32"]))


def stream(seconds, efficiency=0.9):
    return op("aten::mul_", seconds, size=round(efficiency * seconds * CEILINGS.copy[-1][1]))


def gather(seconds):
    """Little work in much time."""
    return op("aten::gather", seconds, size=round(0.05 * seconds * CEILINGS.copy[-1][1]))


def tiny(seconds):
    """Calls without work, each at the cost of a call."""
    return op("aten::add", seconds, calls=round(seconds / CEILINGS.op_seconds))


def step(*ops, python=0.0, wait=0.0, contention=0.0, elasticity=None, **changes):
    """A step of these operators, Python and a wait for its batch.

    contention: seconds by which a step is slower while the loader works. elasticity: of half the
    batch; None leaves that experiment out.
    """
    length = sum(op.seconds[0] for op in ops) + python
    events = sum(op.events for op in ops)
    profiled = Profiled((length + events * CEILINGS.event_seconds,) * 3, events, ops)
    with_overhead = tuple(
        replace(op, seconds=tuple(s + op.events * CEILINGS.event_seconds for s in op.seconds))
        for op in ops
    )
    half = None if elasticity is None else run(length * 2**-elasticity, seed=2)
    values = {
        "plain": run(length + contention, wait),
        "cached": run(length, seed=1),
        "half": half,
        "ceilings": CEILINGS,
        "profiled": replace(profiled, ops=with_overhead),
        "threads": 1,
        "cpus": 2.0,
    }
    return Evidence(**(values | changes))


def gpu_step(length=10 * MS, ops=(), wait=0.0, **gpu):
    """A step on a GPU. gpu: fields of Gpu."""
    about = {"busy": 0.9, "host_waits": 0.5, "kernels": 1000, "median_kernel": 50e-6} | gpu
    profiled = Profiled((length,) * 3, 1000, tuple(ops)) if ops else None
    return Evidence(
        plain=run(length, wait),
        cached=run(length, seed=1),
        ceilings=CEILINGS,
        profiled=profiled,
        gpu=Gpu(**about),
        device="cuda",
    )
