"""`fusedops.compare`: the speedup between two reports of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from fusedops.measuring.quantiles import quantiles
from fusedops.measuring.ratios import Ratio
from fusedops.measuring.units import seconds_text
from fusedops.profiling.report import Profile
from fusedops.profiling.shares import BOUNDS
from fusedops.profiling.show.text import NAMES

__all__ = ["Comparison", "compare"]

RESAMPLES = 2000
SAME = ("device", "threads", "cpus", "torch")


@dataclass(frozen=True)
class Comparison:
    """seconds: of a step before and after, medians without what other programs took.

    ratio: before over after, so that above 1 is faster, with its 95 % interval. shares: bound ->
    middle share before and after. bounds: the two verdicts.
    """

    seconds: tuple[float, float]
    ratio: Ratio
    shares: dict[str, tuple[float, float]]
    bounds: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def verdict(self) -> str:
        """ "faster", "slower" or "no difference", if the interval contains 1."""
        if self.ratio.low > 1:
            return "faster"
        return "slower" if self.ratio.high < 1 else "no difference"

    def __str__(self) -> str:
        before, after = self.seconds
        was, now = (" and ".join(map(_limit, bounds)) for bounds in self.bounds)
        lines = [
            f"{self.verdict}: {self.ratio}, a step takes {seconds_text(after)} instead of "
            f"{seconds_text(before)}",
            f"limited by {was}" if was == now else f"limited by {was} before, by {now} after",
            f"{'time of a step':31}{'before':>12}{'after':>12}",
        ]
        for bound, (share, other) in self.shares.items():
            if max(share, other) >= 0.005:
                times = f"{seconds_text(share * before):>12}{seconds_text(other * after):>12}"
                lines.append(f"{NAMES[bound]:31}{times}")
        return "\n".join(lines)


def _limit(bound: str) -> str:
    return "no single resource" if bound == "unknown" else bound


def compare(before: str | Path | Profile, after: str | Path | Profile) -> Comparison:
    """Compares two reports, or the files that `Profile.save` wrote.

    Raises ValueError if they come from different machines, numbers of threads or versions of
    torch: then a ratio would say nothing of the change.
    """
    reports = [
        report if isinstance(report, Profile) else Profile.load(report)
        for report in (before, after)
    ]
    evidence = [report.evidence for report in reports]
    facts = [e.about | {"threads": e.threads, "cpus": e.cpus} for e in evidence]
    for name in SAME:
        values = [fact.get(name) for fact in facts]
        if values[0] != values[1]:
            raise ValueError(
                f"compare: both reports must have the same {name}, got {values[0]} and {values[1]}"
            )
    before_s, after_s = (e.plain.running for e in evidence)
    shares = [report.verdict.shares for report in reports]
    return Comparison(
        (median(before_s), median(after_s)),
        _ratio(before_s, after_s),
        {bound: (shares[0][bound][1], shares[1][bound][1]) for bound in BOUNDS},
        (reports[0].verdict.bounds, reports[1].verdict.bounds),
    )


def _ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Ratio of the medians, with a bootstrap interval.

    The runs share no rounds, so each is resampled separately.
    """
    random = Random(0)
    drawn = [
        median(random.choices(before, k=len(before))) / median(random.choices(after, k=len(after)))
        for _ in range(RESAMPLES)
    ]
    low, high = quantiles(drawn, 0.025, 0.975)
    return Ratio(median(before) / median(after), low, high)
