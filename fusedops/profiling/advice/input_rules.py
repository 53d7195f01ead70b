"""Advice on batches: how they are loaded, collated and filled."""

from collections.abc import Iterator
from math import ceil

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.steps import around_optimizer, full_step, step
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import elasticity

__all__ = ["collate", "padding", "useful_workers", "workers"]

PADDING = 0.15  # share of the tokens from which padding matters
BUSY = 0.1  # share of the step in which other programs had its CPU; then no CPU is free


def useful_workers(evidence: Evidence) -> int:
    """As many as feed the step, at most one for each CPU that torch's threads leave."""
    spare = max(0, int(evidence.cpus) - evidence.threads)
    rate = evidence.loader.batches_per_s if evidence.loader else None
    return spare if not rate else min(spare, max(1, ceil(1 / (step(evidence) * rate))))


def workers(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    loader = evidence.loader
    count = useful_workers(evidence)
    if "input" not in verdict.bounds or loader is None or loader.asynchronous or count < 1:
        return
    if sum(evidence.plain.running) < (1 - BUSY) * sum(evidence.plain.seconds):
        return  # measured with two busy CPUs: a worker gets none, and the step is no faster
    kept, full = step(evidence), full_step(evidence)
    slowest = kept
    if loader.batches_per_s:
        slowest = max(kept, 1 / (loader.batches_per_s * count))
    yield Advice(
        "workers",
        f"num_workers={count} for the DataLoader",
        "the step waits for its batch, and CPUs are free",
        f"DataLoader(..., num_workers={count}, persistent_workers=True)",
        "each worker holds a copy of the dataset",
        "T - max(T with kept batches, 1 / (loader's batches/s x workers))",
        Saving(seconds=max(0.0, full - slowest)),
    )


def collate(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    loader = evidence.loader
    if "input" not in verdict.bounds or loader is None:
        return
    for function, share in loader.functions.items():
        yield Advice(
            "collate",
            f"a faster {function.partition(' ')[0]}",
            f"{share:.0%} of the loader's time is in {function}",
            "do its work once, before training, or in tensor operations on whole batches",
            "none for the model",
            "at most: T x the input's share x the function's share of the loader's time",
            Saving(seconds=share * verdict.shares["input"][1] * full_step(evidence)),
        )


def padding(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    tokens = evidence.tokens
    if tokens.real is None or not tokens.padded or 1 - tokens.real / tokens.padded < PADDING:
        return
    share = 1 - tokens.real / tokens.padded
    measured = elasticity(evidence)
    power = 1.0 if measured is None else min(1.0, max(0.0, measured))
    yield Advice(
        "padding",
        "batches of similar lengths, or packed sequences",
        f"{share:.0%} of the tokens are padding",
        "sort by length within a window, or pack and pass cu_seqlens to fusedops' attention",
        "the order of samples changes",
        "at most: T of forward and backward x (1 - (real tokens / all tokens)^elasticity), the "
        "elasticity measured with half the batch, else 1",
        Saving(seconds=around_optimizer(evidence) * (1 - (1 - share) ** power)),
    )
