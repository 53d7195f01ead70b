"""Advice to compute in bfloat16: the saving of each function timed in autocast."""

from collections.abc import Iterator

from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.advice.patches import by_kind, total
from fusedops.profiling.advice.steps import step
from fusedops.profiling.evidence import Autocast, Evidence, Op
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import bandwidth, op_seconds
from fusedops.profiling.show.text import saving_text

__all__ = ["bf16"]

FASTER = 1.5  # how many times as fast bfloat16 products must be to be worth it
MATTER = 0.1  # share of the step from which its products matter
NAMED = 3  # functions that the advice names
FORMULA = (
    "sum over the step's calls whose dtypes autocast changes of (t as they are - t in autocast, "
    "with its casts), each timed for about 20 ms on the step's own tensors, forward and backward; "
    "bytes: what the forward keeps for backward, before - in autocast"
)


CASTS = 3  # calls that autocast adds to a product: of both operands, and of a gradient
ROUGH = (
    "sum over the step's float32 products of (t at float32's peak - t at bfloat16's - the bytes "
    "that they read and write / the speed of a copy - 3 calls of an operator, for the casts)"
)


def bf16(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Its prediction is rough where no call was timed in autocast."""
    peaks = evidence.ceilings.flops if evidence.ceilings else {}
    seconds_by_op = op_seconds(evidence)
    if seconds_by_op is None or not {"float32", "bfloat16"} <= set(peaks):
        return
    products = sum(s for op, s in seconds_by_op[0].items() if op.flops and op.dtype == "float32")
    ratio = peaks["bfloat16"] / peaks["float32"]
    if ratio < FASTER or products < MATTER * step(evidence):
        return
    timed = evidence.autocast
    formula = ""
    predicted = None
    if timed is not None:
        formula, predicted = FORMULA, _saving(timed)
    else:
        formula, predicted = ROUGH, _rough_saving(evidence, seconds_by_op[0], ratio)
    if predicted is not None and (predicted.seconds or 0.0) <= 0:
        return
    yield Advice(
        "bf16",
        "bfloat16 products",
        f"float32 products take {products / step(evidence):.0%}; large bfloat16 ones are "
        f"{ratio:.1f} times as fast here{_named(timed)}",
        f'with torch.autocast("{evidence.device}", torch.bfloat16): around the forward',
        "sums of products have 8 bits; compare the loss",
        formula,
        predicted,
    )


def _saving(timed: Autocast) -> Saving:
    before, after = timed.kept
    return Saving(seconds=total(timed.timed).seconds, bytes=before - after)


def _rough_saving(evidence: Evidence, seconds: dict[Op, float], ratio: float) -> Saving:
    ceilings = evidence.ceilings
    assert ceilings is not None
    saved = 0.0
    for op, in_float32 in seconds.items():
        if op.flops and op.dtype == "float32":
            at_peak = min(in_float32, op.flops / ceilings.flops["float32"])
            casts = op.bytes / bandwidth(ceilings, op.bytes // op.calls)
            calls = CASTS * op.calls * ceilings.op_seconds
            saved += at_peak * (1 - 1 / ratio) - casts - calls
    return Saving(seconds=saved)


def _named(timed: Autocast | None) -> str:
    """Text of the functions whose time changes most."""
    if timed is None:
        return ""
    changes = sorted(by_kind(timed).items(), key=lambda pair: -abs(pair[1].seconds or 0.0))
    texts = [
        f"{name} {saving_text(Saving(seconds=saving.seconds))}" for name, saving in changes[:NAMED]
    ]
    left = f"; {timed.left} calls were not compared" if timed.left else ""
    return (f". In autocast: {', '.join(texts)}" if texts else "") + left
