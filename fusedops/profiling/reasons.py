"""Writes sentences that explain, with measured numbers, what limits a profiled step."""

from collections.abc import Callable, Iterator
from statistics import median

from fusedops.measuring.units import bytes_text, count_text, seconds_text
from fusedops.profiling.evidence import Ceilings, Evidence, Op
from fusedops.profiling.shares import (
    computing_seconds,
    elasticity,
    ideal,
    op_parts,
    op_seconds,
    working_ceilings,
)

__all__ = ["reasons"]

TOP = 3  # operators that a sentence names
LONGEST = 70  # characters of an operator with its shapes


def reasons(
    evidence: Evidence, shares: dict[str, tuple[float, float, float]], bounds: tuple[str, ...]
) -> Iterator[str]:
    """The numbers for each bound that was named."""
    writers: dict[str, Callable[[Evidence], Iterator[str]]] = {
        "input": _input,
        "launch": _launch,
        "memory": _memory,
        "compute": _compute,
        "kernels": _kernels,
        "allocation": _allocation,
        "threads": _threads,
        "sync": _sync,
        "communication": _communication,
    }
    for bound in bounds:
        if bound in writers:
            yield from writers[bound](evidence)
    if evidence.gpu is not None and evidence.gpu.slowed_by:
        yield f"the GPU's clock is lowered: {', '.join(evidence.gpu.slowed_by)}"
    run = evidence.base
    if (others := 1.0 - sum(run.running) / sum(run.seconds)) >= 0.05:
        yield f"other programs had the CPU for {others:.0%} of the time, which is left out"
    if bounds == ("unknown",) and run.cpu and shares["unknown"][1] >= 0.25:
        running = median(c / s for c, s in zip(run.cpu, run.running, strict=True))
        yield (
            f"the thread that runs the step was on a CPU {running:.0%} of that time, with "
            f"{run.involuntary} involuntary and {run.voluntary} voluntary context switches"
        )


def _input(evidence: Evidence) -> Iterator[str]:
    plain, loader = evidence.plain, evidence.loader
    if evidence.cached is not None:
        kept, as_is = (seconds_text(median(run.seconds)) for run in (evidence.cached, plain))
        yield f"with batches kept in memory a step takes {kept} instead of {as_is}"
    if plain.wait:
        yield f"a step waits {seconds_text(median(plain.wait))} for its batch"
    if loader and loader.batches_per_s:
        step = loader.batches / computing_seconds(evidence)
        yield (
            f"the loader alone gives {loader.batches_per_s:.3g} batches/s, the step alone takes "
            f"{step:.3g}; {count_text(loader.workers, 'worker')}, "
            f"{count_text(evidence.cpus, 'CPU')}, {count_text(evidence.threads, 'thread')}"
        )
    if evidence.gpu is not None and (size := evidence.gpu.copies.pageable):
        yield f"a step copies {bytes_text(size)} from memory that is not pinned"
    for function, share in (loader.functions if loader else {}).items():
        yield f"{share:.0%} of the loader's time is in {function}"


def _launch(evidence: Evidence) -> Iterator[str]:
    if evidence.gpu is not None:
        gpu = evidence.gpu
        yield (
            f"the GPU is busy {gpu.busy:.0%} of the step: {gpu.kernels} kernels, median "
            f"{gpu.median_kernel * 1e6:.1f} us"
        )
        if evidence.plain.synced:
            yield f"the host waits for the GPU in {gpu.host_waits:.0%} of the step"
    exponent = elasticity(evidence)
    if exponent is not None:
        yield f"elasticity {exponent:.2f}: 0 means that half the batch saves nothing"
    if evidence.profiled and evidence.ceilings:
        calls = sum(op.calls for op in evidence.profiled.ops)
        yield (
            f"{calls} operator calls a step; the cheapest call costs "
            f"{evidence.ceilings.op_seconds * 1e6:.1f} us here"
        )


def _memory(evidence: Evidence) -> Iterator[str]:
    yield from _top(evidence, "memory", _bandwidth)


def _compute(evidence: Evidence) -> Iterator[str]:
    yield from _top(evidence, "compute", _rate)


def _kernels(evidence: Evidence) -> Iterator[str]:
    yield from _top(evidence, "kernels", _slowness)


def _top(
    evidence: Evidence, bound: str, text: Callable[[Ceilings, Op, float], str]
) -> Iterator[str]:
    """The operators with the largest part in a bound."""
    seconds_by_op, ceilings = op_seconds(evidence), working_ceilings(evidence)
    if seconds_by_op is None or ceilings is None:
        return
    seconds = seconds_by_op[0]
    parts = {op: op_parts(op, s, ceilings).get(bound, 0.0) for op, s in seconds.items()}
    for op in sorted(parts, key=lambda op: -parts[op])[:TOP]:
        if parts[op] > 0.01 * sum(seconds.values()):
            yield f"{_called(op)}: {text(ceilings, op, seconds[op])}"


def _called(op: Op) -> str:
    name = f"{op.name} {op.shapes}".rstrip()
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    return f"{name} in {op.module}" if op.module else name


def _bandwidth(ceilings: Ceilings, op: Op, seconds: float) -> str:
    possible = op.bytes / max(ideal(op, ceilings)[1], 1e-12)
    return f"{op.bytes / seconds / 1e9:.3g} GB/s of {possible / 1e9:.3g} possible here"


def _rate(ceilings: Ceilings, op: Op, seconds: float) -> str:
    if not op.flops:
        return _bandwidth(ceilings, op, seconds)
    peak = ceilings.flops.get(op.dtype, 0.0)
    rate = op.flops / seconds / 1e9
    return f"{rate:.3g} GFLOP/s of {peak / 1e9:.3g} possible here in {op.dtype}"


def _slowness(ceilings: Ceilings, op: Op, seconds: float) -> str:
    best = max(ideal(op, ceilings))
    return f"{seconds / max(best, 1e-9):.1f} times as long as this machine allows"


def _allocation(evidence: Evidence) -> Iterator[str]:
    if evidence.gpu is not None and (evidence.gpu.mallocs or evidence.gpu.alloc_retries):
        mallocs, retries = evidence.gpu.mallocs, evidence.gpu.alloc_retries
        yield f"{mallocs:.3g} cudaMalloc and {retries:.3g} retries a step"
        return
    run = evidence.base
    total = max(run.user + run.system, 1e-9)
    yield (
        f"{run.faults / len(run.seconds):.0f} page faults a step; the operating system takes "
        f"{run.system / total:.0%} of the CPU time"
    )


def _threads(evidence: Evidence) -> Iterator[str]:
    run = evidence.cached or evidence.plain
    threads, cpus = count_text(evidence.threads, "thread"), count_text(evidence.cpus, "CPU")
    yield f"torch uses {threads} on {cpus}"
    if evidence.fewer_threads is not None:
        yield (
            f"with as many threads as CPUs a step takes "
            f"{seconds_text(median(evidence.fewer_threads.seconds))} instead of "
            f"{seconds_text(median(run.seconds))}"
        )
    if run.throttled or run.steal >= 0.03:
        yield f"throttled for {seconds_text(run.throttled)}; {run.steal:.0%} of CPU time withheld"


def _sync(evidence: Evidence) -> Iterator[str]:
    for sync in evidence.gpu.syncs if evidence.gpu else ():
        yield f"{sync.where}: the GPU is idle for {seconds_text(sync.gap)} after it"


def _communication(evidence: Evidence) -> Iterator[str]:
    exposed = evidence.gpu.exposed_communication if evidence.gpu else evidence.communication
    yield f"collectives that nothing overlaps take {seconds_text(exposed or 0.0)} a step"
