"""Advice with savings from timed parts: patch, loss, bf16 and AdamW."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from fusedops.measuring.changes import CHANGES
from fusedops.profiling.advice.advice import Advice, Saving, optimizer_step, step
from fusedops.profiling.evidence import Autocast, Evidence, Op, Patching, SiteTime
from fusedops.profiling.judge import Verdict
from fusedops.profiling.shares import bandwidth, op_seconds
from fusedops.profiling.show.text import saving_text

__all__ = ["adamw8bit", "bf16", "by_kind", "fused_adamw", "loss", "patch", "total"]

LARGEST = 3  # logits are worth it among so many of a step's largest activations

PATCH = (
    "sum over patch's calls in a step of (t of the model's code - t of the fused function), each "
    "timed for about 20 ms on the call's own tensors, forward and backward; bytes: what the calls "
    "keep for backward, such as b h l^2 scores, and at the loss's peak, such as b l V logits"
)
FASTER = 1.5  # how many times as fast bfloat16 products must be to be worth it
PRODUCTS = 0.1  # share of the step from which its products matter
NAMED = 3  # functions that the advice names
AUTOCAST = (
    "sum over the step's calls whose dtypes autocast changes of (t as they are - t in autocast, "
    "with its casts), each timed for about 20 ms on the step's own tensors, forward and backward; "
    "bytes: what the forward keeps for backward, before - in autocast"
)
CASTS = 3  # calls that autocast adds to a product: of both operands, and of a gradient
ROUGH = (
    "sum over the step's float32 products of (t at float32's peak - t at bfloat16's - the bytes "
    "that they read and write / the speed of a copy - 3 calls of an operator, for the casts)"
)
OPTIMIZER_STATE = 0.05  # share of parameters and state from which state matters
STATE_8BIT = 2.03  # bytes of AdamW8bit's state for a parameter; AdamW's are 8
SMALLER = 0.1  # share of the state that AdamW8bit must save
LEAST = 0.01  # share of the step that a faster AdamW must save
ADAMW = (
    "T of the optimizer x (1 - t of {} / t of the user's), each timed for about 20 ms on random "
    "tensors of the parameters' shapes"
)


def patch(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """One advice if `fusedops.patch` would fuse anything that is not fused yet.

    Without a prediction where no call was timed.
    """
    patching = evidence.patching
    if patching is None or not patching.sites:
        return
    kinds = ", ".join(f"{n} {kind}" for kind, n in patching.sites.items())
    yield Advice(
        "patch",
        "fusedops.patch(model)",
        f"it would fuse {kinds} sites{_by_kind_text(patching)}",
        "fusedops.patch(model)",
        "results differ by rounding; fusedops.verify(model, batch) compares",
        PATCH if patching.timed else "",
        total(patching.timed) if patching.timed or patching.left else None,
    )


def loss(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """The part of `patch` that needs no logits, where these are among the largest activations."""
    patching, memory, largest = evidence.patching, evidence.memory, evidence.activations
    if patching is None or memory is None or "loss" not in patching.sites:
        return
    above = sum(size > memory["logits"] for size in largest.values())
    if not memory["logits"] or above >= LARGEST:
        return
    timed = [site for site in patching.timed if site.kind == "loss"]
    share = memory["logits"] / memory["peak"]
    yield Advice(
        "loss",
        "the loss without its logits",
        f"logits and what the loss saves of them take {share:.0%} of the peak's size",
        f"{CHANGES['loss'].code.strip()}; fusedops.patch(model) contains it",
        "outputs.logits is computed when it is read, before optimizer.step()",
        PATCH if timed else "",
        total(timed) if timed else None,
    )


def by_kind(timed_sites: Patching | Autocast) -> dict[str, Saving]:
    """What a step would save at the sites of each kind, the most first."""
    sites: dict[str, list[SiteTime]] = defaultdict(list)
    for site in timed_sites.timed:
        sites[site.kind].append(site)
    savings = {kind: total(same) for kind, same in sites.items()}
    return dict(sorted(savings.items(), key=lambda pair: -(pair[1].seconds or 0.0)))


def total(sites: Iterable[SiteTime]) -> Saving:
    """What a step saves at all of these."""
    sites = list(sites)
    seconds = sum(site.calls * _call_seconds(site) for site in sites)
    return Saving(seconds=seconds, bytes=sum(site.bytes for site in sites))


def _call_seconds(site: SiteTime) -> float:
    """What one call saves, by the median ratio of the pairs of blocks."""
    ratio = median(a / b for a, b in zip(site.after, site.before, strict=True))
    return median(site.before) * (1 - ratio)


def _by_kind_text(patching: Patching) -> str:
    """Text of the savings by kind, the most first, and of the calls without any."""
    texts = [f"{kind} {saving_text(saving)}" for kind, saving in by_kind(patching).items()]
    texts += [f"{patching.left} calls would run torch's code as before"] if patching.left else []
    return f": {'; '.join(texts)}" if texts else ""


def bf16(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Its prediction is rough where no call was timed in autocast."""
    peaks = evidence.ceilings.flops if evidence.ceilings else {}
    seconds_by_op = op_seconds(evidence)
    if seconds_by_op is None or not {"float32", "bfloat16"} <= set(peaks):
        return
    products = sum(s for op, s in seconds_by_op[0].items() if op.flops and op.dtype == "float32")
    ratio = peaks["bfloat16"] / peaks["float32"]
    if ratio < FASTER or products < PRODUCTS * step(evidence):
        return
    timed = evidence.autocast
    if timed is not None:
        formula, predicted = AUTOCAST, _autocast_saving(timed)
    else:
        formula, predicted = ROUGH, _rough_saving(evidence, seconds_by_op[0], ratio)
        if any(op.flops and not op.shapes for op in seconds_by_op[0]):
            formula = f"at most, since casts in compiled code are not known: {ROUGH}"
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


def _autocast_saving(timed: Autocast) -> Saving:
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


def adamw8bit(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Its time has no prediction where no step of it was timed."""
    about = evidence.about
    elements, state = about.get("adamw_elements", 0), about.get("adamw_bytes", 0)
    held = state + about.get("parameter_bytes", 0)
    if not elements or state < OPTIMIZER_STATE * held:
        return
    saved = round((state / elements - STATE_8BIT) * elements)
    if saved < SMALLER * state:
        return
    seconds = _optimizer_saving(evidence, "adamw8bit")
    timed = "" if seconds is None else ADAMW.format("AdamW8bit") + "; "
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
    saved, torchs = (_optimizer_saving(evidence, name) for name in ("fused_adamw", "torch_fused"))
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
        ADAMW.format("fused AdamW"),
        Saving(seconds=saved),
    )


def _optimizer_saving(evidence: Evidence, name: str) -> float | None:
    """Seconds of a step that another optimizer saves; None if it was not timed or never steps."""
    for timed in evidence.optimizers or ():
        if timed.name == name:
            ratio = median(a / b for a, b in zip(timed.after, timed.before, strict=True))
            recorded = bool(evidence.base.optimizer)
            whole = optimizer_step(evidence) if recorded else median(timed.before) / timed.share
            if not whole:
                return None
            return whole * (1 - ratio)
    return None
