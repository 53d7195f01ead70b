"""Shows the demo's results: numbers, a table and a plot."""

from pathlib import Path
from statistics import fmean, median
from typing import Any

from fusedops.demo.peak import Fresh
from fusedops.demo.training import (
    COMPILED,
    CONTENDERS,
    EAGER,
    FUSED,
    TORCH_FUSED,
    Settings,
    Trainer,
)
from fusedops.measuring.quantiles import quantiles
from fusedops.measuring.ratios import Ratio, paired_ratio

WARMUP = 3  # steps excluded from timing: allocations, the matrix library's caches
LAST = 10  # the final loss is the mean of the last steps
COLORS = {EAGER: "#9aa5b1", TORCH_FUSED: "#3d5a80", COMPILED: "#e09f3e", FUSED: "#d1495b"}
HEADER = ("tokens/s", "over eager", "p50 ms", "p95 ms", "MiB", "loss")


def summary(trainers: dict[str, Trainer], fresh: dict[str, Fresh], settings: Settings) -> dict:
    """All numbers in the table, and the curves."""
    eager, fused = trainers[EAGER], trainers[FUSED]
    gaps = [abs(a - b) for a, b in zip(eager.losses, fused.losses, strict=True)]
    return {
        "ratio": _over(eager, fused),
        "fused_over": {
            name: _over(trainer, fused) for name, trainer in trainers.items() if name != FUSED
        },
        "max_loss_difference": max(gaps),
        "parameters": sum(p.numel() for p in eager.model.parameters()),
        "contenders": {
            name: _numbers(trainer, settings)
            | fresh[name]._asdict()
            | {"over_eager": _over(eager, trainer)}
            for name, trainer in trainers.items()
        },
    }


def timed(trainer: Trainer) -> list[float]:
    return trainer.seconds[WARMUP:]


def _over(slow: Trainer, fast: Trainer) -> dict[str, float]:
    return paired_ratio(timed(slow), timed(fast))._asdict()


def _numbers(trainer: Trainer, settings: Settings) -> dict:
    p50, p95 = quantiles(timed(trainer), 0.5, 0.95)
    return {
        "tokens_per_s": settings.tokens / p50,
        "step_p50_s": p50,
        "step_p95_s": p95,
        "final_loss": fmean(trainer.losses[-LAST:]),
        "losses": trainer.losses,
        "seconds": trainer.seconds,
    }


def table(results: dict) -> str:
    """A line per contender, at most 80 columns wide; a contender's may be a reason instead."""
    rows = {name: _row(results, name) for name in CONTENDERS}
    whole = [HEADER, *(cells for cells in rows.values() if len(cells) == len(HEADER))]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    first = max(map(len, CONTENDERS))
    return "\n".join(
        f"{name:{first}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=False))
        for name, cells in {"": HEADER, **rows}.items()
    )


def _row(results: dict, name: str) -> tuple[str, ...]:
    """A contender's cells; one with the reason if it could not run."""
    if name not in results["contenders"]:
        return (f"not available: {results['unavailable'][name]}",)
    numbers = results["contenders"][name]
    return (
        f"{numbers['tokens_per_s']:,.0f}",
        "" if name == EAGER else interval(numbers["over_eager"]),
        f"{numbers['step_p50_s'] * 1e3:.1f}",
        f"{numbers['step_p95_s'] * 1e3:.1f}",
        f"{numbers['peak_bytes'] / 2**20:,.0f}",
        f"{numbers['final_loss']:.4f}",
    )


def interval(ratio: dict[str, float]) -> str:
    return "{median:.2f}x ({low:.2f}..{high:.2f})".format(**ratio)


def notes(results: dict) -> str:
    """What the table's columns leave out."""
    lines = [
        "tokens/s, p50, p95: of step times; over eager: paired ratio, with its 95 % interval",
        f"MiB: peak memory of a fresh process; loss: mean of the last {LAST} steps",
        f"fused and eager: losses at most {results['max_loss_difference']:.4f} apart",
    ]
    if (compiled := results["contenders"].get(COMPILED)) is not None:
        lines.append(
            f"torch.compile: compiled in {compiled['compile_s']:.0f} s, which no step includes"
        )
    return "\n".join(lines)


def verdict(results: dict) -> str:
    """The claims that the intervals support, favourable or not."""
    return "\n".join(_verdict(name, Ratio(**of)) for name, of in results["fused_over"].items())


def _verdict(other: str, ratio: Ratio) -> str:
    if ratio.low > 1:
        return f"Fused trains {ratio.median:.2f} times as fast as {other} here."
    if ratio.high < 1:
        return f"Fused is slower than {other} here: {ratio.median:.2f} times its speed."
    return f"No difference in speed to {other} was found here: the interval of {ratio} contains 1."


def plot(results: dict, path: Path) -> None:
    """Plots every contender's loss curve and distribution of step times, as a PNG."""
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
    over = interval(results["ratio"])
    dtype = results["settings"]["dtype"]
    return f"Llama, {size:.1f}M parameters, {dtype}, AdamW, {machine}: fused over eager {over}"


def _plot_losses(axes, results: dict) -> None:
    # The curves should coincide: eager is drawn broad below, fused thin on top.
    for i, (name, numbers) in enumerate(results["contenders"].items()):
        losses, width = numbers["losses"], 4.0 - i
        axes.plot(range(1, len(losses) + 1), losses, color=COLORS[name], lw=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
    axes.grid(alpha=0.25)


def _plot_times(axes, results: dict) -> None:
    millis = {
        name: [1e3 * seconds for seconds in results["contenders"][name]["seconds"][WARMUP:]]
        for name in results["contenders"]
    }
    every = [step for steps in millis.values() for step in steps]
    longest = min(max(every), 1.6 * median(every))  # else a few stalls would flatten the plot
    shown: dict[str, Any] = {"bins": 35, "range": (min(every), longest), "alpha": 0.5}
    for name, steps in millis.items():
        middle = median(steps)
        label = f"{name}, median {middle:.1f} ms"
        axes.hist([min(s, longest) for s in steps], **shown, color=COLORS[name], label=label)
        axes.axvline(middle, color=COLORS[name], lw=1.6)
    axes.set(xlabel="step time (ms); the last bar counts all slower steps", ylabel="steps")
    axes.set_title("Step times")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
