"""From an Evidence to advice: pure functions, each with its condition and its formula."""

from collections.abc import Callable, Iterator
from statistics import median

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.patches import patch
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import bandwidth, elasticity, identity, op_seconds

__all__ = ["advise"]

PADDING, STATE, FROZEN = 0.15, 0.05, 0.5  # shares from which padding, state, frozen weights matter
FASTER = 1.5  # how many times as fast bfloat16 products must be to be worth it
BUSY = 0.1  # share of the step in which other programs had its CPU; then no CPU is free
PEAK = 0.75  # of the ceiling: from there on nothing here helps a compute-bound step
INT4 = 4.5 / 8  # bytes of an nf4 weight with its scale
STATE_8BIT = 2.03  # bytes of AdamW8bit's state for a parameter; AdamW's are 8


def advise(evidence: Evidence, verdict: Verdict) -> list[Advice]:
    """What applies to the step, the largest predicted gain first."""
    found = [one for rule in RULES for one in rule(evidence, verdict)]
    return sorted(found, key=lambda one: -one.gain)


def _step(evidence: Evidence) -> float:
    return median((evidence.cached or evidence.plain).running)


def _full(evidence: Evidence) -> float:
    return median(evidence.plain.running)


def workers(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    loader = evidence.loader
    spare = int(evidence.cpus) - evidence.threads
    if "input" not in verdict.bounds or loader is None or loader.asynchronous or spare < 1:
        return
    if sum(evidence.plain.running) < (1 - BUSY) * sum(evidence.plain.seconds):
        return  # measured with two busy CPUs: a worker gets none, and the step is no faster
    step, full = _step(evidence), _full(evidence)
    slowest = step
    if loader.batches_per_s:
        slowest = max(step, 1 / (loader.batches_per_s * spare))
    yield Advice(
        "workers",
        f"num_workers={spare} for the DataLoader",
        "the step waits for its batch, and CPUs are free",
        f"DataLoader(..., num_workers={spare}, persistent_workers=True)",
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
            Saving(seconds=share * verdict.shares["input"][1] * _full(evidence)),
        )


def padding(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    tokens = evidence.tokens
    if tokens.real is None or not tokens.padded or 1 - tokens.real / tokens.padded < PADDING:
        return
    share = 1 - tokens.real / tokens.padded
    yield Advice(
        "padding",
        "batches of similar lengths, or packed sequences",
        f"{share:.0%} of the tokens are padding",
        "sort by length within a window, or pack and pass cu_seqlens to fusedops' attention",
        "the order of samples changes",
        "T of forward and backward x padding",
        Saving(seconds=share * max(0.0, _step(evidence) - _optimizer(evidence))),
    )


def _optimizer(evidence: Evidence) -> float:
    run = evidence.cached or evidence.plain
    return median(run.optimizer) if run.optimizer else 0.0


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
        Saving(seconds=verdict.shares["allocation"][1] * _full(evidence)),
    )


def threads(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    if evidence.fewer_threads is None or "threads" not in verdict.bounds:
        return
    base, fewer = evidence.cached or evidence.plain, evidence.fewer_threads
    yield Advice(
        "threads",
        f"{int(evidence.cpus)} threads",
        f"torch uses {evidence.threads} threads on {evidence.cpus:g} CPUs",
        f"torch.set_num_threads({int(evidence.cpus)})",
        "none",
        "T - T with as many threads as CPUs, both measured",
        Saving(seconds=median(base.seconds) - median(fewer.seconds)),
    )


def batch(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    found = elasticity(evidence, identity(evidence))
    if "launch" not in verdict.bounds or found is None:
        return
    both = max(0.0, _step(evidence) - _optimizer(evidence))
    yield Advice(
        "batch",
        "twice the batch",
        f"half the batch saves little (elasticity {found:.2f}), so twice the batch costs little",
        "a larger batch_size; fewer gradient accumulation steps keep the optimizer's batch",
        "more memory for activations; another batch size may need another learning rate",
        "for the same samples: T of forward and backward x (1 - 2^(elasticity - 1))",
        Saving(seconds=both * max(0.0, 1 - 2 ** (found - 1))),
    )


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


def bf16(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    peaks = evidence.ceilings.flops if evidence.ceilings else {}
    found = op_seconds(evidence, identity(evidence))
    if found is None or not {"float32", "bfloat16"} <= set(peaks):
        return
    products = sum(s for op, s in found[0].items() if op.flops and op.dtype == "float32")
    ratio = peaks["bfloat16"] / peaks["float32"]
    if ratio < FASTER or products < 0.1 * _step(evidence):
        return
    yield Advice(
        "bf16",
        "bfloat16 products",
        f"float32 products take {products / _step(evidence):.0%}; bfloat16 ones are {ratio:.1f} "
        "times as fast here",
        f'with torch.autocast("{evidence.device}", torch.bfloat16): around the forward',
        "sums of products have 8 bits; compare the loss",
        "time of float32 products x (1 - 1 / measured ratio)",
        Saving(seconds=products * (1 - 1 / ratio)),
    )


def adamw8bit(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    about = evidence.about
    elements, state = about.get("adamw_elements", 0), about.get("adamw_bytes", 0)
    held = state + about.get("parameter_bytes", 0)
    if not elements or state < STATE * held or evidence.ceilings is None:
        return
    saved = round((state / elements - STATE_8BIT) * elements)
    if saved <= 0:
        return
    seconds = 2 * saved / bandwidth(evidence.ceilings, 2**40)
    yield Advice(
        "adamw8bit",
        "AdamW8bit",
        f"the optimizer's state has {state / elements:.3g} bytes a parameter",
        "fusedops.optim.AdamW8bit(model.parameters(), ...)",
        "moments are rounded to 8 bits; compare the loss",
        "(bytes a parameter - 2.03) x parameters of 4096 elements and more; their reading and "
        "writing at this machine's bandwidth",
        Saving(seconds=seconds, bytes=saved),
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
        f"{frozen / parameters:.0%} of the parameters' bytes are frozen",
        'fusedops.quantize(model, "nf4")',
        "weights are rounded to 4 bits; compare the loss",
        "bytes of frozen parameters - 4.5 bits of each element",
        Saving(bytes=saved),
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
    quantize_lora,
    patch,
    nothing,
)
