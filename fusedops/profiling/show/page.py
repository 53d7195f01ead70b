"""A profile report as one HTML file: no script, no other file, no network."""

import importlib.util
from pathlib import Path
from typing import Any

from fusedops.measuring.units import bytes_text, count_text, seconds_text
from fusedops.profiling.judge import THRESHOLDS
from fusedops.profiling.show.colors import COLORS, ink
from fusedops.profiling.show.numbers import mebibytes, share_text, span_text, times
from fusedops.profiling.show.template import TEMPLATE
from fusedops.profiling.show.text import (
    CATEGORIES,
    NAMES,
    OUTSIDE,
    PHASES,
    parameters_text,
    saving_text,
    shown_bounds,
)

Profile = Any  # of report.py, which imports this file
__all__ = ["page", "title"]

TOP_MODULES, TOP_OPS = 12, 25  # rows that are shown
LABELLED = 0.08  # share of the step from which a part of the bar has its number inside


def page(report: Profile, path: str | Path) -> None:
    """Writes the file. Raises ModuleNotFoundError without jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError(
            "profile: html needs jinja2, which is missing: pip install 'fusedops[profile]'"
        )
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(TEMPLATE)
    Path(path).write_text(template.render(_values(report)), encoding="utf-8")


def title(report: Profile) -> str:
    """The verdict as a heading."""
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return "No single bound was found"
    parts = [f"{NAMES[b]}, {share_text(verdict.shares[b][1])} of the step" for b in verdict.bounds]
    return "Limited by " + " and by ".join(parts)


def _values(report: Profile) -> dict[str, object]:
    verdict, time = report.verdict, report.time
    shares = [_share(report, bound) for bound in shown_bounds(report)]
    phases = [f"{PHASES.get(name, name)} {seconds_text(s)}" for name, s in time.phases.items() if s]
    slower = f"{time.inflation:.2f} times" if time.inflation is not None else ""
    return {
        "title": title(report).replace(" %", "\u00a0%"),  # not at the end of a line
        "model": parameters_text(report) or "a step",
        "next": _next(report),
        "facts": _facts(report),
        "reasons": verdict.evidence,
        "step": seconds_text(time.seconds),
        "shares": shares,
        "stack": ", ".join(f"{share['name']} {share['text']}" for share in shares),
        "phases": f"Phases: {', '.join(phases)}.",
        "inflation": slower
        and f"torch.profiler made the step {slower} as long; no time here contains that.",
        **_memory(report),
        **_tables(report),
        "advice": [_advice(advice) for advice in report.advice],
        "machine": _machine(report),
        "ceilings": _ceilings(report),
        "not_checked": verdict.not_checked,
    }


def _next(report: Profile) -> str:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return ""
    return " and ".join(NAMES[bound] for bound in verdict.next_bounds)


def _facts(report: Profile) -> list[dict[str, str]]:
    """The numbers at the top: value, and a remark in small print."""
    time = report.time
    facts = [("step", seconds_text(time.seconds), f"{span_text(time.low, time.high)}, 95 %")]
    if time.tokens_per_s:
        padding = f"{share_text(time.padding)} of all are padding" if time.padding else ""
        facts.append(("tokens/s", f"{time.tokens_per_s:,.0f}", padding))
    elif time.samples_per_s:
        facts.append(("samples/s", f"{time.samples_per_s:,.1f}", ""))
    if time.mfu is not None:
        facts.append(("MFU", share_text(time.mfu), "of this machine's measured peak"))
    if report.memory:
        facts.append(("memory", bytes_text(report.memory["peak"]), "at the step's peak"))
    return [{"name": name, "value": value, "remark": remark} for name, value, remark in facts]


def _share(report: Profile, bound: str) -> dict[str, object]:
    low, middle, high = report.verdict.shares[bound]
    return {
        "name": NAMES[bound],
        "named": bound in report.verdict.bounds,
        "percent": round(100 * middle, 2),
        "low": round(100 * low, 2),
        "width": round(100 * (high - low), 2),
        "text": share_text(middle),
        "label": middle >= LABELLED,
        "interval": f"{100 * low:.0f}..{100 * high:.0f} %",
        "limit": round(100 * THRESHOLDS[bound]) if bound in THRESHOLDS else None,
        "color": COLORS[bound],
        "ink": ink(COLORS[bound]),
    }


def _memory(report: Profile) -> dict[str, object]:
    sizes = {name: size for name, size in (report.memory or {}).items() if size}
    slack = sizes.pop("slack", 0)
    names = sorted(sizes, key=lambda name: (name != "peak", -sizes[name]))
    largest = max(sizes.values(), default=1)
    return {
        "peak": bytes_text(sizes["peak"]) if "peak" in sizes else "",
        "memory": [
            {
                "name": CATEGORIES.get(name, name.replace("_", " ")),
                "text": mebibytes(sizes[name]),
                "percent": round(100 * sizes[name] / largest, 1),
                "peak": name == "peak",
            }
            for name in names
        ],
        "slack": slack
        and f"The process holds {bytes_text(slack)} more: the interpreter, libraries, memory that "
        "was freed and kept, and tensors that the step does not use.",
    }


def _tables(report: Profile) -> dict[str, object]:
    modules, ops = report.modules[:TOP_MODULES], report.ops[:TOP_OPS]
    unit, module_times = times([row.seconds for row in modules])
    op_unit, op_times = times([s for row in ops for s in (row.seconds, row.possible)])
    return {
        "unit": unit,
        "modules": [
            {"name": row.name or OUTSIDE, "time": time, "share": share_text(row.share)}
            for row, time in zip(modules, module_times, strict=True)
        ],
        "op_unit": op_unit,
        "ops": [
            {
                "name": row.name,
                "shapes": row.shapes,
                "module": row.module or OUTSIDE,
                "calls": f"{row.calls:,}",
                "time": time,
                "share": f"{100 * row.share:.1f} %",
                "possible": possible,
                "bound": NAMES[row.bound],
            }
            for row, time, possible in zip(ops, op_times[::2], op_times[1::2], strict=True)
        ],
    }


def _advice(advice: Any) -> dict[str, str]:
    predicted = (
        f"predicted {saving_text(advice.predicted)}" if advice.predicted else "no prediction"
    )
    return {
        "title": advice.title,
        "how": advice.how,
        "why": advice.why,
        "risk": advice.risk,
        "formula": advice.formula,
        "predicted": predicted,
        "measured": saving_text(advice.measured),
    }


def _machine(report: Profile) -> str:
    machine, about = report.machine, report.machine.about
    versions = [f"{name} {about[name]}" for name in ("torch", "transformers") if about.get(name)]
    threads, cpus = count_text(machine.threads, "thread"), count_text(machine.cpus, "CPU")
    steps = count_text(report.time.steps, "step")
    return ", ".join([machine.device, f"{threads} on {cpus}", *versions, f"{steps} timed"])


def _ceilings(report: Profile) -> str:
    ceilings = report.machine.ceilings
    if ceilings is None:
        return ""
    peaks = [
        f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in sorted(ceilings.flops.items())
    ]
    copies = f"copies {ceilings.copy[-1][1] / 1e9:.1f} GB/s of memory"
    call = f"a call of an operator takes {seconds_text(ceilings.op_seconds)}"
    return f"Measured here: {', '.join([*peaks, copies, call])}."
