"""Shows the demo's results: numbers, a table and a plot."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fusedops.demo.training import CONTENDERS, Settings, Trainer
from fusedops.profiling.timing import Ratio, paired_ratio, quantiles

WARMUP = 3  # steps excluded from timing: allocations, the matrix library's caches
LAST = 10  # the final loss is the mean of the last steps
COLORS = {"eager": "#9aa5b1", "fused": "#d1495b"}


def summary(trainers: dict[str, Trainer], peaks: dict[str, int], settings: Settings) -> dict:
    """All numbers in the table, and the curves."""
    eager, fused = (trainers[name] for name in CONTENDERS)
    gaps = [abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=True)]
    return {
        "ratio": paired_ratio(timed(eager), timed(fused))._asdict(),
        "max_loss_difference": max(gaps),
        "parameters": sum(p.numel() for p in eager.model.parameters()),
        "contenders": {
            name: _numbers(trainer, peaks[name], settings) for name, trainer in trainers.items()
        },
    }


def timed(trainer: Trainer) -> list[float]:
    return trainer.seconds[WARMUP:]


def _numbers(trainer: Trainer, peak: int, settings: Settings) -> dict:
    p50, p95 = quantiles(timed(trainer), 0.5, 0.95)
    return {
        "tokens_per_s": settings.tokens / p50,
        "step_p50_s": p50,
        "step_p95_s": p95,
        "peak_bytes": peak,
        "final_loss": fmean(trainer.losses[-LAST:]),
        "losses": trainer.losses,
        "seconds": trainer.seconds,
    }


def table(results: dict) -> object:
    """A rich table with a column per contender; plain text if rich is not installed."""
    try:
        from rich.table import Table
    except ModuleNotFoundError:
        return _plain(_rows(results))
    shown = Table(title="Same model, same batches, alternating steps")
    shown.add_column()
    for name in CONTENDERS:
        shown.add_column(name, justify="right")
    for name, cells in _rows(results).items():
        shown.add_row(name, *cells)
    return shown


def _plain(rows: dict[str, list[str]]) -> str:
    lines = {"": [*CONTENDERS], **rows}
    return "\n".join(f"{name:32}{eager:>14}{fused:>26}" for name, (eager, fused) in lines.items())


def _rows(results: dict) -> dict[str, list[str]]:
    def both(key: str, form: Callable[[float], str]) -> list[str]:
        return [form(results["contenders"][name][key]) for name in CONTENDERS]

    return {
        "tokens/s (median step)": both("tokens_per_s", lambda v: f"{v:,.0f}"),
        "paired ratio (95 % interval)": ["", speed(results)],
        "step time p50": both("step_p50_s", lambda v: f"{v * 1e3:.1f} ms"),
        "step time p95": both("step_p95_s", lambda v: f"{v * 1e3:.1f} ms"),
        "peak memory, fresh process": both("peak_bytes", lambda v: f"{v / 2**20:,.0f} MiB"),
        f"final loss (last {LAST} steps)": both("final_loss", lambda v: f"{v:.4f}"),
        "largest loss difference": ["", f"{results['max_loss_difference']:.4f}"],
    }


def speed(results: dict) -> str:
    return "{median:.3f}x ({low:.3f}..{high:.3f})".format(**results["ratio"])


def verdict(results: dict) -> str:
    """The claim that the interval supports, favourable or not."""
    ratio = Ratio(**results["ratio"])
    if ratio.low > 1:
        return f"Fused trains {ratio.median:.2f} times as fast as eager here."
    if ratio.high < 1:
        return f"Fused is slower here: {ratio.median:.2f} times eager's speed."
    return f"No difference in speed was found here: the interval of {ratio} contains 1."


def plot(results: dict, path: Path) -> None:
    """Plots both loss curves and both distributions of step times, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    losses, times = figure.subplots(1, 2)
    _plot_losses(losses, results)
    _plot_times(times, results)
    for axes in (losses, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(_title(results), fontsize=11)
    figure.savefig(path)


def _title(results: dict) -> str:
    size, threads = results["parameters"] / 1e6, results["threads"]
    machine = f"{results['device']}, {threads} thread{'s' if threads > 1 else ''}"
    return f"Llama, {size:.1f}M parameters, bfloat16, AdamW, {machine}: fused {speed(results)}"


def _plot_losses(axes, results: dict) -> None:
    # The curves should coincide: eager is drawn broad below, fused thin on top.
    for name, width in (("eager", 4.0), ("fused", 1.2)):
        losses = results["contenders"][name]["losses"]
        axes.plot(range(1, len(losses) + 1), losses, color=COLORS[name], lw=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.25)


def _plot_times(axes, results: dict) -> None:
    millis = {
        name: [1e3 * seconds for seconds in results["contenders"][name]["seconds"][WARMUP:]]
        for name in CONTENDERS
    }
    every = [step for steps in millis.values() for step in steps]
    longest = min(max(every), 1.6 * median(every))  # else a few stalls would flatten the plot
    shown: dict[str, Any] = {"bins": 35, "range": (min(every), longest), "alpha": 0.6}
    for name, steps in millis.items():
        middle = median(steps)
        label = f"{name}, median {middle:.1f} ms"
        axes.hist([min(s, longest) for s in steps], **shown, color=COLORS[name], label=label)
        axes.axvline(middle, color=COLORS[name], lw=1.6)
    axes.set(xlabel="step time (ms); the last bar counts all slower steps", ylabel="steps")
    axes.set_title("Step times")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
