"""Draws a bar chart of training steps' speed over eager PyTorch, for light and dark pages."""

import hashlib
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from benchmarks.figures.registry import FIGURES, MODELS
from benchmarks.figures.results import RESULTS, FigureError

__all__ = ["PLOTS", "data", "digest_in", "drawn"]

WIDTH = 8.0  # inches; at 100 dots an inch, the width of a page on GitHub
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Helvetica", "Arial", "sans-serif"]
MARK = "data sha256:"

# ink, background, grid, and the bars: eager, torch.compile, fusedops. The bars differ in lightness
# and hatching, so that they can be told apart in black and white.
THEMES = {
    "light": ("#1f2328", "#ffffff", "#d1d9e0", ("#ffffff", "#d8e0e8", "#4f93d6")),
    "dark": ("#e6edf3", "#0d1117", "#30363d", ("#0d1117", "#59636e", "#6cb6ff")),
}
HATCHES = ("", "////", "")
NAMES = {"llama": "Llama", "gpt2": "GPT-2", "bert": "BERT", "t5": "T5"}
CONTENDERS = {"compile": "torch.compile", "fusedops": "fusedops"}

# Rows of 4: median and the ends of the interval, by dtype and contender.
Data = dict[str, Any]


def steps(results: Path = RESULTS) -> Data:
    """Training steps' speed relative to eager, and where they were measured."""
    values = {}
    for dtype in ("float32", "bfloat16"):
        for name in CONTENDERS:
            figures = (FIGURES[f"step.{model}.{dtype}.{name}"] for model in MODELS)
            values[f"{dtype} {name}"] = [_raw(figure.raw, results) for figure in figures]
    where = FIGURES["step.llama.float32.fusedops"].result(results).where
    where = {key: where[key] for key in ("device", "threads", "torch", "date", "commit")}
    return {"values": values, "where": where}


def _raw(raw: Callable[[Path], Any], results: Path) -> list[float] | None:
    """A ratio with its interval; None if the contender could not run."""
    try:
        return raw(results)
    except FigureError:
        return None


PLOTS: dict[str, Callable[[Path], Data]] = {"step": steps}


def data(results: Path = RESULTS) -> dict[str, Data]:
    """Returns each plot's data, by the plot's name."""
    return {name: plot(results) for name, plot in PLOTS.items()}


def drawn(values: Data, theme: str) -> str:
    """Returns an SVG. Its description holds the hash of the data, for `--check`."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # the reader's fonts
    ink, background, grid, colours = THEMES[theme]
    style = {
        "font.family": FONTS,
        "font.size": 11,
        "svg.fonttype": "none",
        "svg.hashsalt": "fusedops",
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "hatch.color": ink,
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(WIDTH, 3.6), facecolor=background)
        panels = canvas.subplots(1, 2, sharey=True)
        for axes, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
            _panel(axes, values["values"], dtype, (ink, background, grid), colours)
        handles, labels = panels[0].get_legend_handles_labels()
        place = {"loc": "upper left", "bbox_to_anchor": (0.065, 0.9), "ncols": 3}
        canvas.legend(handles, labels, frameon=False, handlelength=1.4, **place)
        where = values["where"]
        about = f"{where['device']}, {where['threads']} thread, torch {where['torch']}"
        once = f"{where['date'][:10]}, commit {where['commit']}"
        title = "Training step: speed relative to eager (higher is better)"
        canvas.text(0.07, 0.93, title, fontsize=13, fontweight="bold")
        lines = "Lines: 95 % interval."
        canvas.text(0.07, 0.02, f"{about}, {once}. {lines}", fontsize=9)
        canvas.subplots_adjust(left=0.07, right=0.985, top=0.74, bottom=0.2, wspace=0.06)
        file = io.StringIO()
        canvas.savefig(
            file,
            format="svg",
            facecolor=background,
            metadata={"Date": None, "Title": title, "Description": MARK + _digest(values)},
        )
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _panel(axes: Any, values: Data, dtype: str, colours: tuple, fills: tuple) -> None:
    ink, background, grid = colours
    axes.set_facecolor(background)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    width, places = 0.27, range(len(MODELS))
    series: list[list] = [[[1.0, 1.0, 1.0]] * len(MODELS)]
    series += [values[f"{dtype} {name}"] for name in CONTENDERS]
    for i, (label, bars) in enumerate(zip(("eager", *CONTENDERS.values()), series, strict=True)):
        at = [place + (i - 1) * width for place in places]
        middles = [bar[0] if bar else 0.0 for bar in bars]
        look = {"color": fills[i], "edgecolor": ink, "linewidth": 0.8, "hatch": HATCHES[i]}
        axes.bar(at, middles, width, label=label, **look)
        timed = [(x, bar) for x, bar in zip(at, bars, strict=True) if i and bar]
        for x, (middle, low, high) in timed:
            axes.plot([x, x], [low, high], color=ink, linewidth=1.2)
            if i == len(CONTENDERS):
                box = {"facecolor": background, "edgecolor": "none", "pad": 0.6}
                axes.text(x, high + 0.04, f"{middle:.2f}x", ha="center", fontsize=9.5, bbox=box)
    axes.set_ylim(0, 1.12 * max(bar[2] for bars in values.values() for bar in bars if bar))
    axes.set_xticks(list(places), [NAMES[model] for model in MODELS])
    axes.set_title(dtype, fontsize=11, loc="right", color=ink)
    axes.tick_params(length=0)
    for side, line in axes.spines.items():
        line.set_visible(side == "bottom")
        line.set_color(ink)


def _digest(values: Data) -> str:
    """The hash of the data and of the code that draws it."""
    text = json.dumps(values, sort_keys=True) + Path(__file__).read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_in(svg: str, values: Data) -> bool:
    """Whether an SVG was drawn from this data. Another matplotlib draws other bytes."""
    return MARK + _digest(values) in svg
