"""Formats times, memory sizes and shares as text for reports."""

from collections.abc import Iterable, Sequence

__all__ = ["mebibytes", "percent", "share_text", "span_text", "time_unit", "times"]

UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def time_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """The unit of a column of times, and its seconds: that of the largest."""
    largest = max(seconds, default=0.0)
    return next((unit for unit in UNITS if largest >= unit[1]), UNITS[-1])


def times(seconds: Sequence[float]) -> tuple[str, list[str]]:
    """A unit, and all times in it with as many decimals."""
    unit, size = time_unit(seconds)
    decimals = 1 if max(seconds, default=0.0) >= 100 * size else 2
    return unit, [f"{value / size:,.{decimals}f}" for value in seconds]


def span_text(low: float, high: float) -> str:
    """92.9..125 ms: both ends of an interval in one unit."""
    unit, size = time_unit([high])
    decimals = 0 if high >= 100 * size else 1 if high >= 10 * size else 2
    return f"{low / size:.{decimals}f}..{high / size:.{decimals}f} {unit}"


def mebibytes(size: float) -> str:
    """12.0, 1,208.4 or <0.1: bytes as a number of MiB for a column."""
    return f"{size / 2**20:,.1f}" if size >= 0.05 * 2**20 else "<0.1"


def percent(share: tuple[float, float, float]) -> str:
    """36 % (34..39): a share with its interval."""
    low, middle, high = (100 * value for value in share)
    return f"{middle:.0f} % ({low:.0f}..{high:.0f})"


def share_text(share: float) -> str:
    """36 %"""
    return f"{round(100 * share)} %"  # never -0
