"""Divides a step's time among its possible bottlenecks, counting nothing twice.

The order decides what an overlap counts as. First what experiments show: `input` is the time that
vanishes with batches in memory, `threads` the time that vanishes with fewer threads. Then what the
system's counters show: time in which the calling thread did not run, and page faults. The rest is
divided by the table of operators: an operator's time is the cost of calling it (`launch`), its work
at this machine's ceilings (`memory` if most of that is traffic beyond the caches, else `compute`)
and what is left (`kernels`); time outside of operators is Python and autograd (`launch`). What has
no explanation is `unknown`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median

from fusedops.measuring.faults import fault_share
from fusedops.profiling.evidence import Ceilings, Evidence, Op, Profiled, Run

__all__ = [
    "BOUNDS",
    "Sample",
    "bandwidth",
    "computing_seconds",
    "elasticity",
    "op_parts",
    "op_seconds",
    "partition",
    "raised",
    "without_wait",
    "working_ceilings",
]

BOUNDS = (
    "input",
    "launch",
    "memory",
    "compute",
    "kernels",
    "allocation",
    "threads",
    "sync",
    "communication",
    "unknown",
)

INTERRUPTED = 2e-3  # seconds from which programs that want the CPU interrupt an operator always
LONG, HIGHEST = 1e-3, 1.5  # an operator of so many seconds raises a ceiling, up to so many times it
CALLING = 10  # a call of a tiny operator may cost this many times the cheapest one's


class Sample:
    """Which of the measured steps to use: all of them, or a bootstrap's draw."""

    def __init__(self, evidence: Evidence, random: Random | None = None) -> None:
        self.random = random
        rounds = len(evidence.plain.seconds)
        self.rounds = self._draw(rounds)
        self.of_profiled = self._draw(len(evidence.profiled.seconds)) if evidence.profiled else []

    def _draw(self, n: int) -> list[int]:
        return [self.random.randrange(n) for _ in range(n)] if self.random else [*range(n)]

    def ratio(self, run: Sequence[float], base: Sequence[float], paired: bool) -> float:
        """Median time of a run over another's: of the rounds' ratios if the rounds are shared."""
        if paired:
            rounds = [i for i in self.rounds if i < min(len(run), len(base))]
            return median(run[i] / base[i] for i in rounds)
        mine, theirs = self._draw(len(run)), self._draw(len(base))
        return median(run[i] for i in mine) / median(base[i] for i in theirs)

    def share(self, part: Sequence[float], whole: Sequence[float]) -> float:
        """Median share that a part has of a whole, 0 where the part was not measured."""
        rounds = [i for i in self.rounds if i < min(len(part), len(whole))]
        return median(part[i] / whole[i] for i in rounds) if rounds else 0.0


def partition(evidence: Evidence, sample: Sample) -> dict[str, float]:
    """Every bound's share of the step; they sum to 1."""
    shares = dict.fromkeys(BOUNDS, 0.0)
    shares["input"] = _input(evidence, sample)
    rest = 1.0 - shares["input"]
    base = evidence.cached or evidence.plain
    if evidence.fewer_threads is not None:
        fewer = sample.ratio(evidence.fewer_threads.seconds, base.seconds, paired=False)
        shares["threads"] = rest * _clamp(1.0 - fewer)
        rest -= shares["threads"]
        base = evidence.fewer_threads
    if evidence.recorded:  # the table is of the loop's own steps
        base = evidence.plain
    if evidence.communication is not None and evidence.gpu is None:
        shares["communication"] = min(rest, evidence.communication / median(evidence.plain.seconds))
        rest -= shares["communication"]
    if evidence.gpu is not None:
        _on_gpu(evidence, sample, rest, shares)
    else:
        _on_cpu(evidence, sample, base, rest, shares)
    shares["unknown"] += 1.0 - sum(shares.values())
    return shares


def _input(evidence: Evidence, sample: Sample) -> float:
    """What vanishes with batches in memory; without that experiment, the time spent in `next`.

    Time in which other programs had the CPUs is left out. A loader's workers are such programs, so
    with workers it counts.
    """
    plain, cached = evidence.plain, evidence.cached
    has_workers = evidence.loader is not None and evidence.loader.asynchronous
    if cached is None or evidence.recorded:
        return _clamp(sample.share(plain.wait, plain.seconds if has_workers else plain.running))
    if has_workers:
        return _clamp(1.0 - sample.ratio(cached.seconds, plain.seconds, paired=False))
    paired = cached.paired and plain.paired
    return _clamp(1.0 - sample.ratio(cached.running, plain.running, paired))


def _on_cpu(
    evidence: Evidence, sample: Sample, base: Run, rest: float, shares: dict[str, float]
) -> None:
    wall = sum(base.running)
    stopped = rest * _stopped(evidence, sample, base)
    withheld = min(stopped, rest * (base.throttled / wall + base.steal))
    if evidence.fewer_threads is None and evidence.threads > evidence.cpus:
        withheld = stopped  # threads that wait for each other's CPU
    shares["threads"] += withheld
    shares["unknown"] += stopped - withheld
    active = rest - stopped
    allocation = active * _faulting(evidence, base)
    shares["allocation"] += allocation
    operator_shares = _operator_shares(evidence, sample, base)
    if operator_shares is None:
        shares["unknown"] += active - allocation
        return
    # Pages are mapped while an operator writes its result, so that time is part of the operators'.
    left = allocation
    for bound in ("kernels", "memory", "launch", "compute"):
        part = active * operator_shares[bound]
        taken = min(part, left)
        left -= taken
        shares[bound] += part - taken


def _stopped(evidence: Evidence, sample: Sample, run: Run) -> float:
    """Share of a step in which the calling thread waited, outside of `next`."""
    if not run.cpu:
        return 0.0
    wait = run.wait if run is evidence.plain else ()
    busy = [s - w for s, w in zip(run.running, wait or [0.0] * len(run.seconds), strict=True)]
    return _clamp(1.0 - sample.share(run.cpu, [max(b, 1e-9) for b in busy]))


def _faulting(evidence: Evidence, run: Run) -> float:
    """Share of the process's CPU time that page faults took."""
    if evidence.ceilings is None:
        return 0.0
    return fault_share(run.user, run.system, run.faults, evidence.ceilings.fault_seconds)


def _operator_shares(evidence: Evidence, sample: Sample, base: Run) -> dict[str, float] | None:
    """Shares of a step's running time, which sum to 1; None without a table of operators."""
    seconds_by_op = op_seconds(evidence, sample)
    if seconds_by_op is None or evidence.ceilings is None:
        return None
    seconds, outside = seconds_by_op
    parts = dict.fromkeys(("launch", "memory", "compute", "kernels"), 0.0)
    for op, measured in seconds.items():
        for bound, part in op_parts(op, measured, evidence.ceilings).items():
            parts[bound] += part
    parts["launch"] += outside  # Python and autograd
    total = sum(parts.values())
    return {bound: part / total for bound, part in parts.items()} if total else None


def op_seconds(
    evidence: Evidence, sample: Sample | None = None
) -> tuple[dict[Op, float], float] | None:
    """Seconds of each operator, and outside of operators, in a step without the profiler.

    On a CPU, the shortest of the profiled steps counts, less the profiler's cost an event: programs
    that interrupt an operator make it only longer. What takes milliseconds is interrupted in every
    step. How long a profiled step ran is known, so what the sum has too much is taken off there. On
    a GPU an operator's time is its kernels', which a profiler does not make longer: the median of
    the steps. None
    without a table of operators.
    """
    profiled, ceilings = evidence.profiled, evidence.ceilings
    if profiled is None or ceilings is None or not profiled.seconds:
        return None
    steps = (sample or Sample(evidence)).of_profiled
    if evidence.gpu is not None:
        return _kernel_seconds(evidence, profiled, steps)
    step = computing_seconds(evidence)
    ran = min(profiled.running[i] for i in steps)
    per_event = min(1.5 * ceilings.event_seconds, max(0.0, ran - step) / max(1, profiled.events))
    seconds = {
        op: max(0.0, min(op.seconds[i] for i in steps) - per_event * op.events)
        for op in profiled.ops
    }
    outside = min(profiled.seconds[i] - sum(op.seconds[i] for op in profiled.ops) for i in steps)
    others = profiled.events - sum(op.events for op in profiled.ops)
    outside = max(0.0, outside - per_event * max(0, others))
    excess = sum(seconds.values()) + outside - (ran - per_event * profiled.events)
    long = sum(s for s in (*seconds.values(), outside) if s > INTERRUPTED)
    if excess > 0 and long:
        left = max(0.0, 1.0 - excess / long)
        seconds = {op: s * (left if s > INTERRUPTED else 1.0) for op, s in seconds.items()}
        outside *= left if outside > INTERRUPTED else 1.0
    total = sum(seconds.values()) + outside
    scale = step / total if total else 1.0
    return {op: s * scale for op, s in seconds.items()}, outside * scale


def computing_seconds(evidence: Evidence) -> float:
    """Seconds of a step with as many threads as CPUs and without the wait for its batch."""
    for run in (evidence.fewer_threads, evidence.cached):
        if run is not None and not evidence.recorded:
            return median(run.running)
    return without_wait(evidence.plain)


def without_wait(run: Run) -> float:
    """Seconds of a step without the wait for its batch."""
    waits = run.wait or [0.0] * len(run.seconds)
    return median(max(0.02 * s, s - w) for s, w in zip(run.running, waits, strict=True))


def _kernel_seconds(
    evidence: Evidence, profiled: Profiled, steps: Sequence[int]
) -> tuple[dict[Op, float], float]:
    seconds = {op: median(op.seconds[i] for i in steps) for op in profiled.ops}
    step = median((evidence.cached or evidence.plain).seconds)
    return seconds, max(0.0, step - sum(seconds.values()))


def working_ceilings(evidence: Evidence) -> Ceilings | None:
    """The ceilings for an operator's own time: a GPU's launch is not part of a kernel's time."""
    if evidence.ceilings is None or evidence.gpu is None:
        return evidence.ceilings
    return replace(evidence.ceilings, op_seconds=0.0)


def raised(evidence: Evidence) -> Ceilings | None:
    """The ceilings, with FLOP/s at least what a long operator of the step reached.

    Ceilings may have been measured in a busier moment, and on another shape. A rate far above them
    raises nothing: then the operator's calls or time are not what they seem.
    """
    seconds_by_op, ceilings = op_seconds(evidence), evidence.ceilings
    if seconds_by_op is None or ceilings is None:
        return ceilings
    flops = dict(ceilings.flops)
    for op, seconds in seconds_by_op[0].items():
        if op.dtype in flops and seconds >= LONG:
            reached = op.flops / seconds
            if reached <= HIGHEST * ceilings.flops[op.dtype]:
                flops[op.dtype] = max(flops[op.dtype], reached)
    return replace(ceilings, flops=flops)


def op_parts(op: Op, seconds: float, ceilings: Ceilings) -> dict[str, float]:
    """How an operator's seconds divide: calling it, its work at the ceilings, and the rest."""
    seconds = max(0.0, seconds)
    compute, memory, calling = ideal(op, ceilings)
    work = min(seconds, max(compute, memory))
    bound = "compute" if compute >= memory or _in_cache(op, ceilings) else "memory"
    allowed = CALLING * calling if max(compute, memory) < calling else calling
    launch = min(seconds - work, allowed)
    return {bound: work, "launch": launch, "kernels": seconds - work - launch}


def ideal(op: Op, ceilings: Ceilings) -> tuple[float, float, float]:
    """Seconds that all calls take at the ceilings: arithmetic, memory traffic, calling."""
    peak = ceilings.flops.get(op.dtype)
    compute = op.flops / peak if op.flops and peak else 0.0
    memory = sum(size / bandwidth(ceilings, distance) for distance, size in op.traffic)
    return compute, memory, op.calls * ceilings.op_seconds


def _in_cache(op: Op, ceilings: Ceilings) -> bool:
    """Whether most of an operator's traffic runs at more than twice the speed of memory."""
    memory = ceilings.copy[-1][1]
    near = sum(size for at, size in op.traffic if bandwidth(ceilings, at) > 2 * memory)
    return near > op.bytes / 2


def bandwidth(ceilings: Ceilings, working_set: int) -> float:
    """Bytes/s of a copy with this working set, interpolated in the logarithm of its size."""
    curve = ceilings.copy
    if working_set <= curve[0][0]:
        return curve[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(curve):
        if working_set <= large:
            part = math.log(working_set / small) / math.log(large / small)
            return fast + part * (slow - fast)
    return curve[-1][1]


def elasticity(evidence: Evidence, sample: Sample | None = None) -> float | None:
    """log2 of the time of forward and backward over that with half the batch; 1: proportional."""
    full, half = evidence.cached or evidence.plain, evidence.half
    if half is None:
        return None
    paired = half.paired and full.paired
    sample = sample or Sample(evidence)
    return -math.log2(sample.ratio(_without_optimizer(half), _without_optimizer(full), paired))


def _without_optimizer(run: Run) -> list[float]:
    optimizer = run.optimizer or [0.0] * len(run.seconds)
    wait = run.wait or [0.0] * len(run.seconds)
    parts = zip(run.running, optimizer, wait, strict=True)
    return [max(s - o - w, 0.02 * s) for s, o, w in parts]


def _on_gpu(evidence: Evidence, sample: Sample, rest: float, shares: dict[str, float]) -> None:
    """Idle time of the GPU by cause, and its busy time by the table of kernels."""
    gpu = evidence.gpu
    assert gpu is not None
    step = median(evidence.plain.seconds)

    busy = min(rest, gpu.busy)
    idle = rest - busy
    seen = {
        "communication": gpu.exposed_communication,
        "allocation": gpu.malloc_seconds,
        "sync": sum(sync.gap for sync in gpu.syncs),
    }
    for bound, seconds in seen.items():
        part = min(idle, seconds / step)
        shares[bound] += part
        idle -= part
    # The GPU waits for launches if its kernels are short, the host never waits for it, and the
    # wait for data is known.
    fed = bool(evidence.plain.wait) or evidence.cached is not None
    launches = fed and gpu.median_kernel < 10e-6 and gpu.host_waits < 0.05
    shares["launch" if launches else "unknown"] += idle
    kernel_parts = _kernel_parts(evidence, sample, gpu.busy * step)
    for bound, part in kernel_parts.items():
        shares[bound] += busy * part


def _kernel_parts(evidence: Evidence, sample: Sample, busy: float) -> dict[str, float]:
    """Shares of the busy time, which sum to 1; a kernel's launch is not part of its time.

    busy: seconds in which the GPU worked. The rest of it, beside the operators, is unknown.
    """
    seconds_by_op, ceilings = op_seconds(evidence, sample), evidence.ceilings
    if seconds_by_op is None or ceilings is None or not seconds_by_op[0]:
        return {"unknown": 1.0}
    parts = dict.fromkeys(("memory", "compute", "kernels"), 0.0)
    for op, seconds in seconds_by_op[0].items():
        compute, memory, _ = ideal(op, ceilings)
        work = min(seconds, max(compute, memory))
        parts["compute" if compute >= memory else "memory"] += work
        parts["kernels"] += seconds - work
    parts["unknown"] = max(0.0, busy - sum(parts.values()))
    total = sum(parts.values())
    return {bound: part / total for bound, part in parts.items()} if total else {"unknown": 1.0}


def _clamp(share: float) -> float:
    return min(1.0, max(0.0, share))
