"""Advice on the optimizer: AdamW8bit, and AdamW in one pass over memory."""

from collections.abc import Iterator
from statistics import median

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.steps import optimizer_step, step
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import Verdict

__all__ = ["adamw8bit", "fused_adamw"]

STATE = 0.05  # share of parameters and state from which state matters
STATE_8BIT = 2.03  # bytes of AdamW8bit's state for a parameter; AdamW's are 8
SMALLER = 0.1  # share of the state that AdamW8bit must save
LEAST = 0.01  # share of the step that a faster AdamW must save
FORMULA = (
    "T of the optimizer x (1 - t of {} / t of the user's), each timed for about 20 ms on random "
    "tensors of the parameters' shapes"
)


def adamw8bit(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Its time has no prediction where no step of it was timed."""
    about = evidence.about
    elements, state = about.get("adamw_elements", 0), about.get("adamw_bytes", 0)
    held = state + about.get("parameter_bytes", 0)
    if not elements or state < STATE * held:
        return
    saved = round((state / elements - STATE_8BIT) * elements)
    if saved < SMALLER * state:
        return
    seconds = _saved(evidence, "adamw8bit")
    timed = "" if seconds is None else FORMULA.format("AdamW8bit") + "; "
    yield Advice(
        "adamw8bit",
        "AdamW8bit",
        f"the optimizer's state has {state / elements:.3g} bytes a parameter",
        "fusedops.optim.AdamW8bit(model.parameters(), ...)",
        "moments are rounded to 8 bits; compare the loss",
        f"{timed}bytes: (bytes a parameter - 2.03) x parameters of 4096 elements and more",
        Saving(seconds=seconds, bytes=saved),
    )


def fused_adamw(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    saved, torchs = (_saved(evidence, name) for name in ("fused_adamw", "torch_fused"))
    if saved is None or saved < LEAST * step(evidence):
        return
    share = optimizer_step(evidence) / step(evidence)
    others = ""
    if torchs is not None and torchs > 0:
        others = f"; torch's own fused=True would save {torchs * 1e3:.3g} ms"
    yield Advice(
        "fused_adamw",
        "fused AdamW",
        f"the optimizer takes {share:.0%} of the step, and reads its state several times{others}",
        "fusedops.optim.AdamW(model.parameters(), ...)",
        "results differ by rounding; state dicts are torch's",
        FORMULA.format("fused AdamW"),
        Saving(seconds=saved),
    )


def _saved(evidence: Evidence, name: str) -> float | None:
    """Seconds of a step that another optimizer saves; None if it was not timed or never steps."""
    for timed in evidence.optimizers or ():
        if timed.name == name:
            ratio = median(a / b for a, b in zip(timed.after, timed.before, strict=True))
            recorded = bool((evidence.cached or evidence.plain).optimizer)
            whole = optimizer_step(evidence) if recorded else median(timed.before) / timed.share
            if not whole:
                return None
            return whole * (1 - ratio)
    return None
