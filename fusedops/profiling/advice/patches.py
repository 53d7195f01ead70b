"""Advice to call `fusedops.patch`: the saving by kind of fused function, from timed calls."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from fusedops.measuring.changes import CHANGES
from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.evidence import Autocast, Evidence, Patching, SiteTime
from fusedops.profiling.judge import Verdict
from fusedops.profiling.show.text import saving_text

__all__ = ["by_kind", "loss", "patch", "total"]

LARGEST = 3  # logits are worth it among so many of a step's largest activations

FORMULA = (
    "sum over patch's calls in a step of (t of the model's code - t of the fused function), each "
    "timed for about 20 ms on the call's own tensors, forward and backward; bytes: what the calls "
    "keep for backward, such as b h l^2 scores, and at the loss's peak, such as b l V logits"
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
        f"it would fuse {kinds} sites{_savings(patching)}",
        "fusedops.patch(model)",
        "results differ by rounding; fusedops.verify(model, batch) compares",
        FORMULA if patching.timed else "",
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
        FORMULA if timed else "",
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
    seconds = sum(site.calls * _seconds(site) for site in sites)
    return Saving(seconds=seconds, bytes=sum(site.bytes for site in sites))


def _seconds(site: SiteTime) -> float:
    """What one call saves, by the median ratio of the pairs of blocks."""
    ratio = median(a / b for a, b in zip(site.after, site.before, strict=True))
    return median(site.before) * (1 - ratio)


def _savings(patching: Patching) -> str:
    """Text of the savings by kind, the most first, and of the calls without any."""
    texts = [f"{kind} {_text(saving)}" for kind, saving in by_kind(patching).items()]
    texts += [f"{patching.left} calls would run torch's code as before"] if patching.left else []
    return f": {'; '.join(texts)}" if texts else ""


def _text(saving: Saving) -> str:
    return saving_text(replace(saving, bytes=saving.bytes or None))
