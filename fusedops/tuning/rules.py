"""Decides whether `fusedops.tune` keeps a change: by memory and p95 limits, then by speed."""

from dataclasses import dataclass

from fusedops.measuring.ratios import Ratio
from fusedops.measuring.units import bytes_text, seconds_text

__all__ = ["GOALS", "Limits", "MeasuredSetting", "judge"]

GOALS = ("throughput", "latency")
LESS = 0.98  # of the memory or time before: a smaller saving is not worth a change


@dataclass(frozen=True)
class MeasuredSetting:
    """seconds: the median step. p95: None with too few samples. peak_bytes: of a step."""

    seconds: float
    p95: float | None
    peak_bytes: int


@dataclass(frozen=True)
class Limits:
    """p95: seconds of a step. memory: bytes of a step's peak. None where there is no limit."""

    p95: float | None = None
    memory: int | None = None

    def over_memory(self, measured: MeasuredSetting) -> bool:
        return self.memory is not None and measured.peak_bytes > self.memory

    def over_p95(self, measured: MeasuredSetting) -> bool:
        """A p95 that is not known counts by the median, which is never larger."""
        if self.p95 is None:
            return False
        return (measured.seconds if measured.p95 is None else measured.p95) > self.p95


def judge(
    before: MeasuredSetting,
    after: MeasuredSetting,
    ratio: Ratio,
    limits: Limits,
    least: float = 1.0,
) -> tuple[bool, str]:
    """Whether to keep a change, and why.

    ratio: of the goal, above 1 is better; its interval must be above `least`. While a
    limit is exceeded, any change that reduces the excess (memory before time) is kept, even if it
    is slower.
    """
    if limits.over_memory(before):
        kept = after.peak_bytes < LESS * before.peak_bytes
        return kept, "less memory" if kept else "does not bring memory under its limit"
    if limits.over_memory(after):
        return False, f"over the memory limit of {bytes_text(limits.memory or 0)}"
    if limits.over_p95(before):
        kept = after.seconds < LESS * before.seconds
        return kept, "closer to the p95 budget" if kept else "not closer to the p95 budget"
    if limits.over_p95(after):
        return False, f"over the p95 budget of {seconds_text(limits.p95 or 0.0)}"
    if ratio.low > least:
        return True, "faster"
    if ratio.low > 1:
        return False, f"less than {least - 1:.0%} faster"
    return False, "slower" if ratio.high < 1 else "no difference"
