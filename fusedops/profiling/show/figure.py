"""A profile report as one figure: time on the left, memory on the right."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.profiling.show.numbers import mebibytes, share_text
from fusedops.profiling.show.page import COLORS, title
from fusedops.profiling.show.text import CATEGORIES, NAMES, parameters_text, shown_bounds, sizes_of

Profile = Any  # of report.py, which imports this file
__all__ = ["check_matplotlib", "plot", "write_figure"]

DIM = "#59636e"
PEAK, CATEGORY = COLORS["memory"], "#8fb8d6"
DESCRIBED = (".png", ".svg")  # formats whose metadata can hold a description


def plot(report: Profile, path: str | Path) -> None:
    """Writes a figure with two panels, in the format that the path's ending names.

    Raises ModuleNotFoundError without matplotlib.
    """
    check_matplotlib("profile")
    write_figure(lambda: _figure(report), path, title(report), _description(report))


def check_matplotlib(caller: str) -> None:
    """Raises ModuleNotFoundError without matplotlib; its message begins with the caller."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{caller}: plot needs matplotlib, which is missing: pip install 'fusedops[profile]'"
        )


def write_figure(draw: Callable[[], Any], path: str | Path, title: str, description: str) -> None:
    """Writes the figure that `draw` makes, with its description where the format has one."""
    from matplotlib import rc_context

    about = {"Title": title, "Description": description}
    with rc_context({"font.size": 10.0, "svg.fonttype": "none", "text.parse_math": False}):
        metadata = about if str(path).lower().endswith(DESCRIBED) else None
        draw().savefig(path, dpi=150, metadata=metadata)


def _figure(report: Profile) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(shown_bounds(report)), len(sizes_of(report)))
    figure = Figure(figsize=(11, 1.9 + 0.32 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title(report), x=0.01, ha="left", fontsize=14, fontweight="bold")
    about = [parameters_text(report), report.machine.device]
    figure.supxlabel(", ".join(filter(None, about)), x=0.01, ha="left", fontsize=9, color=DIM)
    time, memory = figure.subplots(1, 2)
    _time(time, report)
    _memory(memory, report)
    for axes in (time, memory):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    return figure


def _description(report: Profile) -> str:
    """The figure in words, for people who do not see it."""
    shares = report.verdict.shares
    parts = [f"{NAMES[b]} {share_text(shares[b][1])}" for b in shown_bounds(report)]
    held = [f"{name} {bytes_text(size)}" for name, size in sizes_of(report).items()]
    return f"Time: {', '.join(parts)}. Memory: {', '.join(held) or 'not checked'}."


def _time(axes: Any, report: Profile) -> None:
    shares = report.verdict.shares
    shown = shown_bounds(report)[::-1]
    middles = [100 * shares[bound][1] for bound in shown]
    errors = [
        [100 * (shares[bound][1] - shares[bound][0]) for bound in shown],
        [100 * (shares[bound][2] - shares[bound][1]) for bound in shown],
    ]
    bars = axes.barh(
        [NAMES[bound] for bound in shown],
        middles,
        height=0.65,
        xerr=errors,
        color=[COLORS[bound] for bound in shown],
        error_kw={"ecolor": "#1b1f24", "capsize": 3, "elinewidth": 1.2},
    )
    axes.bar_label(bars, [share_text(middle / 100) for middle in middles], padding=5)
    for label, bound in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if bound in report.verdict.bounds else "normal")
    axes.set_xlim(0, 118 * max(shares[bound][2] for bound in shown))
    axes.set_xlabel("% of a step, with its 95 % interval")
    axes.set_title(f"Time: a step takes {seconds_text(report.time.seconds)}", loc="left")


def _memory(axes: Any, report: Profile) -> None:
    sizes = sizes_of(report)
    if not sizes:
        axes.set_title("Memory", loc="left")
        axes.text(0.5, 0.5, "not checked", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    peak = CATEGORIES["peak"]
    names = list(sizes)[::-1]
    colors = [PEAK if name == peak else CATEGORY for name in names]
    bars = axes.barh(names, [sizes[n] / 2**20 for n in names], height=0.65, color=colors)
    axes.bar_label(bars, [mebibytes(sizes[name]) for name in names], padding=5)
    axes.set_xlabel("MiB, the most that each holds at any time")
    axes.set_xlim(0, 1.15 * max(sizes.values()) / 2**20)
    axes.set_title(f"Memory: {bytes_text(sizes[peak])} at the peak", loc="left")
