"""A profile report as one HTML file: no script, no other file, no network."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedops.measuring.units import bytes_text, count_text, seconds_text
from fusedops.profiling.judge import THRESHOLDS
from fusedops.profiling.show.numbers import mebibytes, share_text, span_text, times
from fusedops.profiling.show.template import TEMPLATE
from fusedops.profiling.show.text import (
    NAMES,
    OUTSIDE,
    parameters_text,
    phases_text,
    predicted_text,
    saving_text,
    shown_bounds,
    sizes_of,
)

Profile = Any  # of report.py, which imports this file
__all__ = ["COLORS", "ink", "page", "title"]

TOP_MODULES, TOP_OPS = 12, 25  # rows that are shown

# Of each bound, from palettes for colorblind readers: Okabe and Ito; Tol.
COLORS = {
    "input": "#d55e00",
    "launch": "#e69f00",
    "memory": "#0072b2",
    "compute": "#56b4e9",
    "kernels": "#cc79a7",
    "allocation": "#f0e442",
    "threads": "#009e73",
    "sync": "#332288",
    "communication": "#882255",
    "unknown": "#999999",
}


def page(report: Profile, path: str | Path) -> None:
    """Writes the file. Raises ModuleNotFoundError without jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError(
            "profile: html needs jinja2, which is missing: pip install 'fusedops[profile]'"
        )
    from jinja2 import Environment

    environment = Environment(autoescape=True)
    environment.globals |= {"NAMES": NAMES, "OUTSIDE": OUTSIDE, "THRESHOLDS": THRESHOLDS}
    environment.globals |= {"COLORS": COLORS, "ink": ink}
    environment.filters |= {"seconds": seconds_text, "size": bytes_text, "mebibytes": mebibytes}
    environment.filters |= {"share": share_text, "saving": saving_text, "predicted": predicted_text}
    text = environment.from_string(TEMPLATE).render(_values(report))
    Path(path).write_text(text, encoding="utf-8")


def ink(color: str) -> str:
    """Black or white, whichever is easier to read on the colour (WCAG's contrast)."""
    red, green, blue = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#ffffff"


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def title(report: Profile) -> str:
    """The verdict as a heading."""
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return "No single bound was found"
    parts = [f"{NAMES[b]}, {share_text(verdict.shares[b][1])} of the step" for b in verdict.bounds]
    return "Limited by " + " and by ".join(parts)


def _values(report: Profile) -> dict[str, object]:
    """What the template shows that is not an attribute of the report."""
    verdict, bounds = report.verdict, shown_bounds(report)
    modules, ops = report.modules[:TOP_MODULES], report.ops[:TOP_OPS]
    unit, module_times = times([row.seconds for row in modules])
    op_unit, op_times = times([s for row in ops for s in (row.seconds, row.possible)])
    return {
        "report": report,
        "verdict": verdict,
        "title": title(report).replace(" %", "\u00a0%"),  # not at the end of a line
        "model": parameters_text(report) or "a step",
        "next": _next(report),
        "facts": [*_facts(report)],
        "bounds": bounds,
        "stack": ", ".join(f"{NAMES[b]} {share_text(verdict.shares[b][1])}" for b in bounds),
        "phases": phases_text(report),
        "sizes": sizes_of(report),
        "unit": unit,
        "modules": list(zip(modules, module_times, strict=True)),
        "op_unit": op_unit,
        "ops": list(zip(ops, op_times[::2], op_times[1::2], strict=True)),
        "machine": _machine(report),
        "ceilings": _ceilings(report),
    }


def _next(report: Profile) -> str:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        return ""
    return " and ".join(NAMES[bound] for bound in verdict.next_bounds)


def _facts(report: Profile) -> Iterator[tuple[str, str, str]]:
    """The numbers at the top: name, value, and a remark in small print."""
    time = report.time
    yield "step", seconds_text(time.seconds), f"{span_text(time.low, time.high)}, 95 %"
    if time.tokens_per_s:
        padding = f"{share_text(time.padding)} of all are padding" if time.padding else ""
        yield "tokens/s", f"{time.tokens_per_s:,.0f}", padding
    elif time.samples_per_s:
        yield "samples/s", f"{time.samples_per_s:,.1f}", ""
    if time.mfu is not None:
        yield "MFU", share_text(time.mfu), "of this machine's measured peak"
    if report.memory:
        yield "memory", bytes_text(report.memory["peak"]), "at the step's peak"


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
