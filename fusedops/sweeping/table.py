"""Formats a sweep's rows as a text table."""

from collections.abc import Sequence

from fusedops.measuring.quantiles import NEEDED
from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.profiling.show.numbers import span_text
from fusedops.sweeping.choice import named
from fusedops.sweeping.row import SweepRow

__all__ = ["text"]

LATENCY = {"generate": "token"}


def text(mode: str, rows: Sequence[SweepRow]) -> str:
    """One line a row; what was not measured says why."""
    measured = [row for row in rows if not row.skipped_reason]
    columns = _columns(mode, rows)
    cells = [[*columns]] + [[column(row) for column in columns.values()] for row in measured]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(_padded, line, wide, range(len(wide)))).rstrip() for line in cells]
    lines += [f"{named(row)}: skipped, {row.skipped_reason}" for row in rows if row not in measured]
    return "\n".join([*lines, *_notes(measured)])


def _columns(mode: str, rows: Sequence[SweepRow]) -> dict:
    """Title -> the function that gives a row's text."""
    what = LATENCY.get(mode, "step")
    columns = {"variant": lambda row: row.variant, "batch": lambda row: str(row.batch)}
    if any(row.length is not None for row in rows):
        columns["length"] = lambda row: str(row.length)
    columns |= {
        f"{what} p50 (95 %)": _median,
        "p95": lambda row: _tail(row.p95),
        "p99": lambda row: _tail(row.p99),
    }
    if mode == "generate":
        columns["first token"] = lambda row: seconds_text(row.first_token)
        columns["end to end"] = lambda row: seconds_text(row.end_to_end)
    columns |= {
        "per sample": lambda row: seconds_text(row.seconds_per_sample),
        "samples/s": lambda row: f"{row.throughput:.3g}",
    }
    if any(row.tokens_per_s is not None for row in rows):
        columns["tokens/s"] = lambda row: f"{row.tokens_per_s or 0:,.0f}"
    columns |= {
        "peak": lambda row: bytes_text(row.peak_bytes) if row.peak_bytes else "",
        "predicted": _predicted,
        "times as fast": lambda row: "" if row.ratio is None else str(row.ratio),
        "": lambda row: "noisy" if row.noisy else "",
    }
    return columns


def _padded(cell: str, wide: int, column: int) -> str:
    return cell.ljust(wide) if column == 0 else cell.rjust(wide)


def _median(row: SweepRow) -> str:
    """52.4 ms (51.8..53.3): the median with its interval."""
    low, high = row.p50_interval or (0.0, 0.0)
    return f"{seconds_text(row.p50 or 0.0)} ({span_text(low, high).partition(' ')[0]})"


def _tail(value: float | None) -> str:
    """A quantile; empty with too few samples."""
    return "" if value is None else seconds_text(value)


def _predicted(row: SweepRow) -> str:
    if row.predicted_bytes is None or not row.peak_bytes:
        return ""
    return f"{row.predicted_bytes / row.peak_bytes - 1:+.1%}"


def _notes(rows: Sequence[SweepRow]) -> list[str]:
    notes = []
    if any(row.p99 is None for row in rows):
        notes.append(f"p95 needs {NEEDED[0.95]} samples and p99 {NEEDED[0.99]}, a larger budget")
    if any(row.predicted_bytes is not None for row in rows):
        notes.append("predicted: the peak that smaller points predicted, against the measured one")
    if any(row.noisy for row in rows):
        notes.append("noisy: other programs had the CPU in more than a tenth of the samples")
    return notes
