"""Lists all advice rules, applies them to a step's measurements, and sorts the advice by gain."""

from collections.abc import Callable, Iterator

from fusedops.profiling.advice.advice import Advice
from fusedops.profiling.advice.input_rules import collate, padding, workers
from fusedops.profiling.advice.memory_rules import checkpoint, offload, quantize_lora, zero
from fusedops.profiling.advice.optimizer_rules import adamw8bit, fused_adamw
from fusedops.profiling.advice.patches import loss, patch
from fusedops.profiling.advice.precision import bf16
from fusedops.profiling.advice.time_rules import (
    batch,
    compiled,
    freed_memory,
    nothing,
    threads,
)
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict

__all__ = ["RULES", "advise"]

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
