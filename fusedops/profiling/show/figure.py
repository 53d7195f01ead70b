"""A report as one figure: time on the left, memory on the right."""

import importlib.util
from pathlib import Path
from typing import Any

from fusedops.profiling.reasons import seconds_text
from fusedops.profiling.shares import BOUNDS
from fusedops.profiling.show.text import NAMES

Profile = Any  # of report.py, which imports this file
__all__ = ["COLORS", "plot"]

COLORS = {
    "input": "#d1495b",
    "launch": "#edae49",
    "memory": "#00798c",
    "compute": "#30638e",
    "kernels": "#7b6d8d",
    "allocation": "#c17817",
    "threads": "#8d6a9f",
    "sync": "#5b8e7d",
    "communication": "#a44a3f",
    "unknown": "#c3c9d0",
}


def plot(report: Profile, path: str | Path) -> None:
    """Writes a figure with two panels, in the format that the path's ending names.

    Raises ModuleNotFoundError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "profile: plot needs matplotlib, which is missing: pip install 'fusedops[profile]'"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    _time(time, report)
    _memory(memory, report)
    figure.savefig(path)


def _time(axes: Any, report: Profile) -> None:
    shares = report.verdict.shares
    shown = [bound for bound in reversed(BOUNDS) if shares[bound][1] >= 0.005]
    middles = [100 * shares[bound][1] for bound in shown]
    errors = [
        [100 * (shares[bound][1] - shares[bound][0]) for bound in shown],
        [100 * (shares[bound][2] - shares[bound][1]) for bound in shown],
    ]
    bars = axes.barh(
        [NAMES[bound] for bound in shown],
        middles,
        xerr=errors,
        color=[COLORS[bound] for bound in shown],
        ecolor="#444444",
        capsize=3,
    )
    axes.bar_label(bars, [f"{middle:.0f} %" for middle in middles], padding=4)
    axes.set_xlim(0, max(10.0, 1.25 * max(shares[bound][2] for bound in shown) * 100))
    axes.set_xlabel("share of a step's time (%), 95 % interval")
    axes.set_title(f"time: a step takes {seconds_text(report.time.seconds)}")
    axes.spines[["top", "right"]].set_visible(False)


def _memory(axes: Any, report: Profile) -> None:
    axes.set_title("memory")
    axes.spines[["top", "right"]].set_visible(False)
    sizes = {name: size for name, size in (report.memory or {}).items() if size}
    if not sizes:
        axes.text(0.5, 0.5, "not checked", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names = sorted(sizes, key=lambda name: sizes[name])
    bars = axes.barh(names, [sizes[name] / 2**20 for name in names], color=COLORS["memory"])
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set_xlabel("MiB")
    axes.margins(x=0.15)
