"""`judge`, a pure function: decides from a step's measurements which resource limits it.

A bound is named if the lower end of its share's interval reaches the bound's threshold, no
experiment contradicts it, and no other bound's share is more than 10 points larger. Two that are
within 10 points are both named, and a wait of 2.5 times its threshold always is. If none is, the
verdict is "unknown", and its evidence says why; of a loop, on which no experiment can say more, the
two largest are named if they explain most of it, and the largest is never left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median, stdev

from fusedops.measuring.quantiles import quantiles
from fusedops.measuring.units import count_text
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.reasons import reasons
from fusedops.profiling.shares import BOUNDS, Sample, elasticity, partition

__all__ = ["THRESHOLDS", "Share", "Verdict", "judge"]

Share = tuple[float, float, float]  # low, middle, high: a 95 % interval

# The share of a step from which a bound limits it.
THRESHOLDS = {
    "input": 0.10,
    "launch": 0.40,
    "memory": 0.40,
    "compute": 0.50,
    "kernels": 0.40,
    "allocation": 0.20,
    "threads": 0.10,
    "sync": 0.10,
    "communication": 0.10,
}
NEAR = 0.10  # two shares that differ by less are both named
WAITS = ("input", "threads", "sync", "communication")  # in which nothing is computed
LONG_WAIT = 2.5  # times its threshold: such a wait is named beside a bound of any size
SCALES, FIXED = 0.7, 0.5  # elasticities: compute-bound steps scale, launch-bound ones do not
UNEXPLAINED, NOISY, INFLATED = 0.25, 0.15, 2.0
FEWEST = 5  # steps from which a verdict is given
RESAMPLES = 200


@dataclass(frozen=True)
class Verdict:
    """Which resource limits a step.

    bounds: the largest first; two within 10 points are both named. shares: bound -> (low, middle,
    high) of the step's time, a 95 % interval; the middles sum to 1. evidence: sentences with the
    numbers that support it. not_checked: what was not measured, and why.
    """

    bounds: tuple[str, ...]
    shares: dict[str, Share]
    evidence: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    next_bounds: tuple[str, ...] = field(default=())

    @property
    def bound(self) -> str:
        """The first of the bounds."""
        return self.bounds[0]

    @property
    def share(self) -> Share:
        """Share of the first bound: (low, middle, high)."""
        return self.shares[self.bound]

    def __str__(self) -> str:
        return " and ".join(self.bounds)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on a step. Raises ValueError if the evidence has no step."""
    if not evidence.plain.seconds:
        raise ValueError("profile: evidence must have at least one step, got none")
    middle = partition(evidence, Sample(evidence))
    drawn = [partition(evidence, sample) for sample in _samples(evidence)]
    shares = {
        bound: _interval(middle[bound], [sampled[bound] for sampled in drawn]) for bound in BOUNDS
    }
    contradicted = dict(_contradicted(evidence, shares))
    bounds = _bounds(evidence, shares, contradicted)
    texts = [*reasons(evidence, shares, bounds), *contradicted.values()]
    if _is_short_loop(evidence):
        steps = count_text(len(evidence.plain.seconds), "step")
        texts.append(f"only {steps} could be timed, so the shares are rough")
    if bounds == ("unknown",):
        texts += _why_unknown(evidence, shares)
    return Verdict(
        bounds,
        shares,
        tuple(texts),
        evidence.not_checked,
        _next(shares, bounds, contradicted),
    )


def _is_short_loop(evidence: Evidence) -> bool:
    """Whether a loop ended before enough of its steps were timed, after its operators were."""
    recorded = evidence.recorded and evidence.profiled is not None
    return recorded and len(evidence.plain.seconds) < FEWEST


def _samples(evidence: Evidence) -> Iterator[Sample]:
    random = Random(0)
    for _ in range(RESAMPLES):
        yield Sample(evidence, random)


def _interval(middle: float, drawn: list[float]) -> Share:
    low, high = quantiles(drawn, 0.025, 0.975)
    return min(low, middle), middle, max(high, middle)


def _bounds(
    evidence: Evidence, shares: dict[str, Share], contradicted: dict[str, str]
) -> tuple[str, ...]:
    if len(evidence.plain.seconds) < FEWEST and not _is_short_loop(evidence):
        return ("unknown",)
    named = [b for b in THRESHOLDS if shares[b][0] >= THRESHOLDS[b] and b not in contradicted]
    named.sort(key=lambda bound: -shares[bound][1])
    largest = max(shares[bound][1] for bound in THRESHOLDS if bound not in contradicted)
    near = tuple(
        bound
        for bound in named
        if shares[bound][1] >= largest - NEAR
        or (bound in WAITS and shares[bound][0] >= LONG_WAIT * THRESHOLDS[bound])
    )
    left = sorted((b for b in THRESHOLDS if b not in contradicted), key=lambda b: -shares[b][1])
    if evidence.recorded and near and left[0] not in near:
        return (left[0], *near)
    if evidence.recorded and not near and shares["unknown"][1] < UNEXPLAINED:
        return tuple(left[:2])
    return near or ("unknown",)


def _next(
    shares: dict[str, Share], bounds: tuple[str, ...], contradicted: dict[str, str]
) -> tuple[str, ...]:
    """Returns the bounds that the step would have without the named bounds' time."""
    rest = 1.0 - sum(shares[bound][1] for bound in bounds)
    left = [b for b in THRESHOLDS if b not in bounds and b not in contradicted]
    return tuple(b for b in left if rest > 0.05 and shares[b][1] / rest >= THRESHOLDS[b])


def _contradicted(evidence: Evidence, shares: dict[str, Share]) -> Iterator[tuple[str, str]]:
    """Bounds that the half-batch run rules out, and why. Differences within noise rule out none."""
    exponent = elasticity(evidence)
    if exponent is None:
        return
    drawn = [e for s in _samples(evidence) if (e := elasticity(evidence, s)) is not None]
    low, high = quantiles(drawn, 0.025, 0.975)
    rules: dict[str, tuple[Callable[[], bool], str]] = {
        "launch": (lambda: low > FIXED, "half the batch takes half the time"),
        "compute": (lambda: high < SCALES, "half the batch takes more than half the time"),
    }
    for bound, (contradicts, text) in rules.items():
        if shares[bound][0] >= THRESHOLDS[bound] and contradicts():
            yield bound, f"not {bound}: {text} (elasticity {exponent:.2f}, {low:.2f}..{high:.2f})"


def _noise(evidence: Evidence) -> float:
    """By how much steps vary: where the same batches ran again, by how much these two differ.

    Batches of other lengths take other times, and that is no noise.
    """
    plain, cached = evidence.plain.running, evidence.cached
    if cached is not None and cached.paired and evidence.plain.paired:
        plain = tuple(p / c for p, c in zip(plain, cached.running, strict=False))
    return stdev(plain) / mean(plain)


def _why_unknown(evidence: Evidence, shares: dict[str, Share]) -> Iterator[str]:
    steps = evidence.plain.seconds
    if len(steps) < FEWEST and not _is_short_loop(evidence):
        yield f"a verdict needs {FEWEST} steps, {len(steps)} were measured"
        return
    largest = sorted((b for b in BOUNDS if b != "unknown"), key=lambda b: -shares[b][1])[:2]
    parts = ", ".join(f"{bound} {shares[bound][1]:.0%}" for bound in largest)
    yield f"no single bound: {parts}"
    if shares["unknown"][1] >= UNEXPLAINED:
        yield f"{shares['unknown'][1]:.0%} of the step is unexplained"
    running = evidence.plain.running
    if len(steps) < 2:
        return
    if (spread := _noise(evidence)) >= NOISY:
        yield f"steps vary by {spread:.0%}: close other programs and repeat"
    profiled = evidence.profiled
    times = median(profiled.running) / median(running) if profiled and profiled.events else 1.0
    if times >= INFLATED:
        yield f"torch.profiler slowed the step {times:.1f}x, so shares of operators are rough"
