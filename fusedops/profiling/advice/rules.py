"""All advice: `RULES`, with the rules on a step's input, time and memory.

A rule is a function of the evidence and the verdict. `timed_rules.py` has those whose savings are
predicted from timed parts of the step.
"""

from collections.abc import Callable, Iterator
from math import ceil
from statistics import median

from fusedops.measuring.units import count_text, seconds_text
from fusedops.profiling.advice.advice import (
    Advice,
    Saving,
    around_optimizer,
    full_step,
    limits,
    optimizer_step,
    step,
    trial_seconds,
)
from fusedops.profiling.advice.timed_rules import adamw8bit, bf16, fused_adamw, loss, patch
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import elasticity, op_parts, op_seconds

__all__ = ["LARGE", "RULES", "advise", "useful_workers"]

PADDING = 0.15  # share of the tokens from which padding matters
BUSY = 0.1  # share of the step in which other programs had its CPU; then no CPU is free
PEAK = 0.75  # of the ceiling: from there on nothing here helps a compute-bound step
FROZEN = 0.5  # share of the parameters from which frozen weights matter
LARGE = 0.4  # share of the peak from which saved activations are worth a recomputation
CONSTANT = 0.3  # share of the step, from which what grows little with the batch matters
OF_ONE = 0.15  # the same for a batch of one sample, which has no half that could show it
STATE = 0.3  # share of the peak from which the optimizer's state is worth dividing
INT4 = 4.5 / 8  # bytes of an nf4 weight with its scale


def useful_workers(evidence: Evidence) -> int:
    """As many as feed the step, at most one for each CPU that torch's threads leave."""
    spare = max(0, int(evidence.cpus) - evidence.threads)
    rate = evidence.loader.batches_per_s if evidence.loader else None
    if not rate:
        return spare
    assert evidence.loader is not None
    return min(spare, max(1, ceil(evidence.loader.batches / (step(evidence) * rate))))


def workers(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    loader = evidence.loader
    count = useful_workers(evidence)
    if not limits(verdict, "input") or loader is None or loader.asynchronous or count < 1:
        return
    if sum(evidence.plain.running) < (1 - BUSY) * sum(evidence.plain.seconds):
        return  # measured with two busy CPUs: a worker gets none, and the step is no faster
    kept, full = step(evidence), full_step(evidence)
    slowest = kept
    if loader.batches_per_s:
        slowest = max(kept, loader.batches / (loader.batches_per_s * count))
    yield Advice(
        "workers",
        f"num_workers={count} for the DataLoader",
        "the step waits for its batch, and CPUs are free",
        f"DataLoader(..., num_workers={count}, persistent_workers=True)",
        "each worker holds a copy of the dataset",
        "T - max(T with kept batches, batches of a step / (loader's batches/s x workers))",
        Saving(seconds=max(0.0, full - slowest)),
    )


def collate(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    loader = evidence.loader
    if not limits(verdict, "input") or loader is None:
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
        "less padding",
        f"{share:.0%} of the tokens are padding",
        "pad each batch only to its longest sequence, and put similar lengths into one batch; or "
        "pack sequences and pass cu_seqlens to fusedops' attention",
        "the order of samples changes",
        "T of forward and backward x (1 - (real tokens / all tokens)^elasticity), the elasticity "
        "measured with half the batch, else 1: time proportional to tokens",
        Saving(seconds=around_optimizer(evidence) * (1 - (1 - share) ** power)),
    )


def freed_memory(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if not limits(verdict, "allocation") or evidence.device != "cpu":
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
    if not limits(verdict, "threads") or evidence.threads <= evidence.cpus:
        return
    base, fewer = evidence.cached or evidence.plain, evidence.fewer_threads
    formula = "T - T with as many threads as CPUs, both measured"
    saved = Saving(seconds=verdict.shares["threads"][1] * full_step(evidence))
    if fewer is None:
        formula = "at most: T x the share in which its threads wait for a CPU"
    else:
        saved = Saving(seconds=median(base.seconds) - median(fewer.seconds))
    yield Advice(
        "threads",
        f"{int(evidence.cpus)} threads",
        f"torch uses {evidence.threads} threads on {evidence.cpus:g} CPUs",
        f"torch.set_num_threads({int(evidence.cpus)})",
        "none",
        formula,
        saved,
    )


def batch(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """From half the batch's time; where that was not measured, from the operators' time."""
    exponent = elasticity(evidence)
    if exponent is not None:
        if "launch" not in verdict.bounds:
            return
        why = f"half the batch saves little (elasticity {exponent:.2f})"
        formula = "T of forward and backward x (1 - 2^(elasticity - 1))"
        saved = around_optimizer(evidence) * max(0.0, 1 - 2 ** (max(0.0, exponent) - 1))
    else:
        constant = _constant_seconds(evidence)
        samples = evidence.tokens.samples
        least = OF_ONE if samples == 1 else CONSTANT
        if not samples or constant < least * step(evidence) or limits(verdict, "threads"):
            return  # products are slow for threads that wait for a CPU, too
        why = (
            f"{constant / step(evidence):.0%} of a step of {count_text(samples, 'sample')} grows "
            "little with the batch: calls of operators, the optimizer, and what products of so "
            "few rows take beyond this machine's peak"
        )
        formula, saved = "half of what grows little with the batch", constant / 2
    yield Advice(
        "batch",
        "twice the batch",
        f"{why}, so twice the batch costs little",
        "a larger batch_size; fewer gradient accumulation steps keep the optimizer's batch",
        "more memory for activations; another batch size may need another learning rate",
        f"at most, for the same samples: {formula}; bytes: activations and logits, which double",
        Saving(seconds=saved, bytes=_bytes_that_grow(evidence)),
    )


def _constant_seconds(evidence: Evidence) -> float:
    """Seconds of a step that grow little with the batch; 0 without a table of a CPU's operators."""
    seconds_by_op, ceilings = op_seconds(evidence), evidence.ceilings
    if seconds_by_op is None or ceilings is None or evidence.gpu is not None:
        return 0.0
    seconds, outside = seconds_by_op
    parts = [(op, op_parts(op, s, ceilings)) for op, s in seconds.items()]
    calls = sum(part["launch"] for _, part in parts)
    slow_products = sum(part["kernels"] for op, part in parts if op.flops and op.shapes)
    return outside + calls + slow_products + optimizer_step(evidence)


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


def quantize_lora(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    frozen, parameters = (
        evidence.about.get(name, 0) for name in ("frozen_bytes", "parameter_bytes")
    )
    elements = evidence.about.get("frozen_elements", 0)
    saved = round(frozen - INT4 * elements)
    if not parameters or frozen < FROZEN * parameters or saved <= 0:
        return
    yield Advice(
        "quantize_lora",
        "quantized frozen weights",
        f"{frozen / parameters:.0%} of the parameters' bytes are frozen"
        f"{_to_measure(evidence, 'quantize_lora', 'the time')}",
        'fusedops.quantize(model, "nf4"), before adapters are added',
        "weights are rounded to 4 bits; compare the loss",
        "bytes of frozen parameters - 4.5 bits of each element",
        Saving(bytes=saved),
    )


def checkpoint(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Where saved activations are a large part of the peak."""
    memory, blocks = evidence.memory, evidence.about.get("blocks", 0)
    if memory is None or not blocks or memory["activations"] < LARGE * memory["peak"]:
        return
    share, forward = memory["activations"] / memory["peak"], _forward(evidence)
    method = evidence.about.get("checkpointing")
    call = "torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)"
    yield Advice(
        "checkpoint",
        f"activation checkpointing of {blocks} blocks",
        f"what is saved for backward takes {share:.0%} of the peak"
        f"{_to_measure(evidence, 'checkpoint', 'what it saves')}",
        f"model.{method}()" if method else f"{call} for each block",
        "the step becomes slower; results are the same, dropout included; BatchNorm's running "
        "statistics are updated twice",
        "at most: bytes that are saved for backward; seconds: - the forward's, which runs twice",
        Saving(seconds=-forward if forward else None, bytes=memory["activations"]),
    )


def _to_measure(evidence: Evidence, name: str, what: str) -> str:
    """Text of the call that measures a change; a loop's report has no step to try it on."""
    if evidence.recorded:
        return ""
    seconds = seconds_text(trial_seconds(evidence))
    return f"; for {what}, try report.measure({name!r}), in {seconds}"


def _forward(evidence: Evidence) -> float:
    """Seconds of a step's forward; 0 if it was not seen."""
    return median(evidence.base.forward or [0.0])


def offload(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """The optimizer's state in the host's memory, which a GPU's step can reach over its bus."""
    state, share = _state(evidence)
    if evidence.device == "cpu" or share < STATE:
        return
    yield Advice(
        "offload",
        "the optimizer's state in the host's memory",
        f"the optimizer's state takes {share:.0%} of the peak",
        "DeepSpeed's offload_optimizer, or CPUOffloadPolicy of torch's fully_shard",
        "gradients and parameters cross the bus in each step, and the CPU computes the update",
        "bytes of the optimizer's state; the seconds depend on the bus and the CPU",
        Saving(bytes=state),
    )


def zero(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """The optimizer's state divided among ranks: those of the job, else this machine's GPUs."""
    state, share = _state(evidence)
    ranks = evidence.processes if evidence.processes > 1 else evidence.about.get("gpus", 1)
    if ranks < 2 or share < STATE or evidence.about.get("sharded"):
        return
    running = evidence.processes > 1
    saved = optimizer_step(evidence) * (1 - 1 / ranks) if running else None
    where = f"{ranks} ranks" if running else f"this machine's {ranks} GPUs"
    yield Advice(
        "zero",
        f"ZeRO: the optimizer's state divided among {where}",
        f"each rank holds all of the state, {share:.0%} of the peak",
        "torch.distributed.optim.ZeroRedundancyOptimizer, or fully_shard for parameters too",
        "checkpoints must gather the state" if running else "a job of several processes",
        "bytes of the state x (1 - 1/N), as in fusedops.memory's zero1; of a running job also, "
        "at most, the optimizer's seconds x (1 - 1/N); the exchange of parameters is left out",
        Saving(seconds=saved, bytes=state - -(-state // ranks)),
    )


def _state(evidence: Evidence) -> tuple[int, float]:
    """Bytes of the optimizer's state, and their share of the peak."""
    memory = evidence.memory
    if not memory or not memory.get("peak"):
        return 0, 0.0
    state = memory.get("optimizer_state", 0)
    return state, state / memory["peak"]


Rule = Callable[[Evidence, Verdict], Iterator[Advice]]
RULES: tuple[Rule, ...] = (
    workers,
    collate,
    padding,
    freed_memory,
    threads,
    batch,
    compiled,
    bf16,
    adamw8bit,
    fused_adamw,
    quantize_lora,
    checkpoint,
    offload,
    zero,
    patch,
    loss,
    nothing,
)


def advise(evidence: Evidence, verdict: Verdict) -> list[Advice]:
    """What applies to the step, the largest predicted gain first."""
    advice = [piece for rule in RULES for piece in rule(evidence, verdict)]
    return sorted(advice, key=lambda piece: -piece.gain)
