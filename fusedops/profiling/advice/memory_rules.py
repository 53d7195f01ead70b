"""Advice that makes a step smaller: its weights."""

from collections.abc import Iterator

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict

__all__ = ["quantize_lora"]

FROZEN = 0.5  # share of the parameters from which frozen weights matter
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
        f"{frozen / parameters:.0%} of the parameters' bytes are frozen",
        'fusedops.quantize(model, "nf4")',
        "weights are rounded to 4 bits; compare the loss",
        "bytes of frozen parameters - 4.5 bits of each element",
        Saving(bytes=saved),
    )
