"""Advice that saves memory: quantized weights, checkpointing, and state kept elsewhere."""

from collections.abc import Iterator
from statistics import median

from fusedops.measuring.units import seconds_text
from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.steps import optimizer_step, trial_seconds
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict

__all__ = ["checkpoint", "offload", "quantize_lora", "zero"]

FROZEN = 0.5  # share of the parameters from which frozen weights matter
LARGE = 0.4  # share of the peak from which saved activations are worth a recomputation
STATE = 0.3  # of the peak: from there on state is worth another place
INT4 = 4.5 / 8  # bytes of an nf4 weight with its scale


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
        f"{frozen / parameters:.0%} of the parameters' bytes are frozen; for the time, try "
        f"report.measure('quantize_lora'), in {seconds_text(trial_seconds(evidence))}",
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
        f"what is saved for backward takes {share:.0%} of the peak; for what it saves, try "
        f"report.measure('checkpoint'), in {seconds_text(trial_seconds(evidence))}",
        f"model.{method}()" if method else f"{call} for each block",
        "the step becomes slower; results are the same, dropout included; BatchNorm's running "
        "statistics are updated twice",
        "at most: bytes that are saved for backward; seconds: - the forward's, which runs twice",
        Saving(seconds=-forward if forward else None, bytes=memory["activations"]),
    )


def _forward(evidence: Evidence) -> float:
    """Seconds of a step's forward; 0 if it was not seen."""
    return median((evidence.cached or evidence.plain).forward or [0.0])


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
