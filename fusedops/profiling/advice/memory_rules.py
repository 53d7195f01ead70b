"""Advice that makes a step smaller: its state and its weights."""

from collections.abc import Iterator

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import bandwidth

__all__ = ["adamw8bit", "quantize_lora"]

STATE, FROZEN = 0.05, 0.5  # shares from which state and frozen weights matter
INT4 = 4.5 / 8  # bytes of an nf4 weight with its scale
STATE_8BIT = 2.03  # bytes of AdamW8bit's state for a parameter; AdamW's are 8


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
