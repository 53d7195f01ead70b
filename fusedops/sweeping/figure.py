"""A sweep as a figure: latency against throughput, one line per variant and length."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fusedops.measuring.units import seconds_text
from fusedops.profiling.show.figure import check_matplotlib, write_figure
from fusedops.sweeping.choice import knees
from fusedops.sweeping.row import SweepRow

__all__ = ["check", "plot"]

# Markers and dashes differ as well as colours (Okabe and Ito), so that black and white will do.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")
AXES = {
    "train": "median time of a training step",
    "forward": "median time of a forward",
    "generate": "median time of a token",
    "step": "median time of a step",
}


def check(path: str | Path) -> None:
    """Raises ModuleNotFoundError without matplotlib, and ValueError for an unknown ending."""
    check_matplotlib("sweep")
    from matplotlib.backend_bases import FigureCanvasBase

    endings, ending = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix.lower()
    if ending and ending[1:] not in endings:
        raise ValueError(f"sweep: plot must end with .{', .'.join(sorted(endings))}, got {path}")


def plot(
    mode: str,
    rows: Sequence[SweepRow],
    about: dict[str, Any],
    path: str | Path,
    p95: float | None,
) -> None:
    """Writes the figure, in the format that the path's ending names. See `Sweep.plot`."""
    check(path)
    title, description = "Latency against throughput", _description(rows)
    write_figure(lambda: _figure(mode, rows, about, p95), path, title, description)


def _figure(mode: str, rows: Sequence[SweepRow], about: dict[str, Any], p95: float | None) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    per_s = _unit(rows)
    for i, (name, curve) in enumerate(_curves(rows)):
        _curve(axes, i, name, curve, per_s)
    _knees(axes, rows, per_s)
    if p95 is not None:
        axes.axvline(p95, color="#59636e", linewidth=1.2, linestyle=(0, (1, 1)))
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "color": "#59636e"}
        text, at = f"budget {seconds_text(p95)}", (p95, 0.02)
        axes.annotate(text, at, (4, 0), textcoords="offset points", **place)
    _seconds(axes, mode)
    axes.set_ylabel("tokens/s" if per_s == "tokens_per_s" else "samples/s")
    highest = max(getattr(row, per_s) for _, curve in _curves(rows) for row in curve)
    axes.set_ylim(0, 1.1 * highest)  # room for the highest point's circle and number
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="numbers: batch size", alignment="left")
    threads = f"{about.get('threads')} thread{'s' * (about.get('threads') != 1)}"
    axes.set_title(f"{about.get('model')}, {threads} of {about.get('device')}", loc="left")
    return figure


def _seconds(axes: Any, mode: str) -> None:
    """The axis of latencies: logarithmic, with round times as labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlabel(f"{AXES[mode]} (log scale)")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.05, high * 1.05)
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 2, 5))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: seconds_text(seconds)))


def _unit(rows: Sequence[SweepRow]) -> str:
    """Tokens a second if all measured rows have them, else samples."""
    measured = [row for row in rows if row.throughput is not None]
    whole = measured and all(row.tokens_per_s is not None for row in measured)
    return "tokens_per_s" if whole else "throughput"


def _curves(rows: Sequence[SweepRow]) -> Iterator[tuple[str, list[SweepRow]]]:
    lengths = {row.length for row in rows}
    for variant, length in dict.fromkeys((row.variant, row.length) for row in rows):
        same = [r for r in rows if (r.variant, r.length) == (variant, length)]
        measured = [row for row in same if row.throughput is not None]
        name = variant if len(lengths) == 1 else f"{variant}, length {length}"
        if measured:
            yield name, sorted(measured, key=lambda row: row.batch)


def _curve(axes: Any, i: int, name: str, rows: Sequence[SweepRow], per_s: str) -> None:
    seconds, rates = [row.p50 for row in rows], [getattr(row, per_s) for row in rows]
    style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
    axes.plot(seconds, rates, label=name, linestyle=DASHES[i % len(DASHES)], **style)
    for row, x, y, following in zip(rows, seconds, rates, [*rates[1:], 0.0], strict=True):
        side, align = (-1, "right") if following > y else (1, "left")  # not on a rising line
        look: dict[str, Any] = {"textcoords": "offset points", "ha": align, "fontsize": 8}
        axes.annotate(f"{row.batch}", (x, y), (7 * side, 6), **look)  # outside of a knee's circle


def _knees(axes: Any, rows: Sequence[SweepRow], per_s: str) -> None:
    at_knees = knees(rows)
    if at_knees:
        axes.plot(
            [row.p50 for row in at_knees],
            [getattr(row, per_s) for row in at_knees],
            linestyle="",
            marker="o",
            markersize=15,
            markerfacecolor="none",
            markeredgecolor="#1b1f24",
            label="knee: twice the batch gives less than 10 % more",
        )


def _description(rows: Sequence[SweepRow]) -> str:
    """The figure in words, for people who do not see it."""
    parts = []
    for name, curve in _curves(rows):
        points = [f"batch {r.batch} {r.p50:.3g} s {r.throughput:.3g} samples/s" for r in curve]
        parts.append(f"{name}: {', '.join(points)}")
    return f"Numbers beside points are batch sizes. {'; '.join(parts)}."
