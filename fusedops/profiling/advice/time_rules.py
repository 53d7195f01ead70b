"""Advice on a step's speed: freed memory, threads, batch size and torch.compile."""

from collections.abc import Iterator
from statistics import median

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.steps import around_optimizer, full_step
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import elasticity

__all__ = ["batch", "compiled", "freed_memory", "nothing", "threads"]

PEAK = 0.75  # of the ceiling: from there on nothing here helps a compute-bound step


def freed_memory(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if "allocation" not in verdict.bounds or evidence.device != "cpu":
        return
    yield Advice(
        "keep_freed_memory",
        "keep freed memory in the process",
        f"page faults take {verdict.shares['allocation'][1]:.0%} of the step",
        "fusedops.keep_freed_memory()",
        "the process does not shrink, and its heap can fragment",
        "T x the share of page faults",
        Saving(seconds=verdict.shares["allocation"][1] * full_step(evidence)),
    )


def threads(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if "threads" not in verdict.bounds or evidence.threads <= evidence.cpus:
        return
    base, fewer = evidence.cached or evidence.plain, evidence.fewer_threads
    yield Advice(
        "threads",
        f"{int(evidence.cpus)} threads",
        f"torch uses {evidence.threads} threads on {evidence.cpus:g} CPUs",
        f"torch.set_num_threads({int(evidence.cpus)})",
        "none",
        "T - T with as many threads as CPUs, both measured" if fewer else "",
        Saving(seconds=median(base.seconds) - median(fewer.seconds)) if fewer else None,
    )


def batch(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    exponent = elasticity(evidence)
    if "launch" not in verdict.bounds or exponent is None:
        return
    yield Advice(
        "batch",
        "twice the batch",
        f"half the batch saves little (elasticity {exponent:.2f}), so twice the batch costs little",
        "a larger batch_size; fewer gradient accumulation steps keep the optimizer's batch",
        "more memory for activations; another batch size may need another learning rate",
        "at most, for the same samples: T of forward and backward x (1 - 2^(elasticity - 1)); "
        "bytes: activations and logits, which double",
        Saving(
            seconds=around_optimizer(evidence) * max(0.0, 1 - 2 ** (max(0.0, exponent) - 1)),
            bytes=_bytes_that_grow(evidence),
        ),
    )


def _bytes_that_grow(evidence: Evidence) -> int | None:
    """The bytes, as a loss, that grow with the number of samples."""
    memory = evidence.memory
    return None if memory is None else -memory["activations"] - memory["logits"]


def compiled(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if "launch" not in verdict.bounds or evidence.profiled is None or evidence.ceilings is None:
        return
    calls = sum(op.calls for op in evidence.profiled.ops)
    yield Advice(
        "compile",
        "torch.compile",
        f"{calls} operators are called in a step",
        "model = torch.compile(model)",
        "compiling takes a minute or more, and again for each new shape",
        "an upper bound: operator calls x the cost of one",
        Saving(seconds=calls * evidence.ceilings.op_seconds),
    )


def nothing(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if verdict.bounds == ("compute",) and verdict.share[0] >= PEAK:
        yield Advice(
            "none",
            "nothing here",
            f"{verdict.share[1]:.0%} of the step is arithmetic at this machine's measured peak",
            "a smaller model, lower precision or more hardware",
            "",
        )
