"""Formats results as text for people and as JSON for programs."""

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import fusedops
from benchmarks.harness.run import COPY, Result
from benchmarks.harness.timing import CPU
from fusedops.backends import cpu_name
from fusedops.measuring.environment import environment
from fusedops.measuring.ratios import Ratio, spread

BASES = ("eager", "huggingface")
CHANGING = ("FUSEDOPS_CPU_ISA", "FUSEDOPS_BACKEND")  # variables that change what is measured


def rows(result: Result, allocator: str, ceiling: float | None = None) -> list[dict]:
    """Returns one JSON row per contender, timed or not.

    `ceiling`, in GB/s, is the machine's copy bandwidth; it applies to the device's clock only.
    """
    case = result.case
    same = {
        "title": case.title,
        "operation": case.operation.name,
        "mode": case.mode,
        "dtype": str(case.dtype).removeprefix("torch."),
        "shape": list(case.shape),
        "allocator": allocator,
        "clock": case.clock,
        "bytes": result.bytes_moved,
    }
    timed = [same | _timed(result, name, ceiling) for name in result.seconds]
    reasons = {"skipped": result.skipped, "refused": result.refused}
    return timed + [
        same | {"contender": name, "status": _status(result, name, status), "reason": reason}
        for status, names in reasons.items()
        for name, reason in names.items()
    ]


def _status(result: Result, name: str, status: str) -> str:
    return "not installed" if name in result.absent else status


def save(args: Namespace, rows: list[dict], goals: list[dict], **more: object) -> None:
    """Writes what a suite measured to `args.json`, with the environment and any `more` keys.

    The environment names the CPU and the version of fusedops.
    """
    where = environment(args.threads, CPU.device) | stamp()
    where |= {name: os.environ[name] for name in CHANGING if name in os.environ}
    document = {"environment": where, **more}
    Path(args.json).write_text(dump(document | {"rows": rows, "goals": goals}))


def stamp() -> dict[str, str]:
    """The CPU and the version of fusedops that a result is of."""
    return {"cpu": cpu(), "fusedops": fusedops.__version__}


def cpu() -> str:
    """This machine's CPU: cloud machines with one model name can have different CPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    numbers = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
    return ", ".join([cpu_name(), *(f"{n} {fields[key]}" for n, key in numbers if key in fields)])


def times(seconds: Sequence[float]) -> dict[str, float]:
    """The median, 10th and 90th percentile of a contender's seconds, as every row has them."""
    quantiles = spread(seconds)
    return {"median_s": quantiles.median, "p10_s": quantiles.p10, "p90_s": quantiles.p90}


def goal(
    title: str, what: str, asked: float, measured: Ratio | float | None, at_most: bool = False
) -> dict:
    """Returns a goal's entry. A ratio or number must be at least, or at most, what was asked."""
    value = measured.median if isinstance(measured, Ratio) else measured
    met = value is not None and (value <= asked if at_most else value >= asked)
    return {"title": title, "what": what, "asked": asked, "measured": measured, "met": met}


def _timed(result: Result, name: str, ceiling: float | None) -> dict:
    seconds = times(result.seconds[name])
    copy = result.ratio(COPY, name)
    row = {"contender": name, "status": "timed", "rounds": len(result.seconds[name])}
    row |= seconds | {"gb_per_s": result.bytes_moved / seconds["median_s"] / 1e9}
    row |= {"percent_of_copy": copy and 100 * copy.median}
    if ceiling and result.case.clock == "device":
        row |= {"percent_of_ceiling": 100 * row["gb_per_s"] / ceiling}
    if result.flops and name != COPY:
        row |= {"tflop_per_s": result.flops / seconds["median_s"] / 1e12}
    if name in result.memory:
        memory = result.memory[name]
        row |= {"peak_bytes": memory.peak, "result_bytes": memory.results}
    row |= {"inexact": result.inexact[name]} if name in result.inexact else {}
    ratios = {base: result.ratio(base, name) for base in BASES if base in result.seconds}
    return row | {f"ratio_to_{base}": ratio and ratio._asdict() for base, ratio in ratios.items()}


def text(rows: list[dict]) -> str:
    """Returns a table of one case, from its rows."""
    first, megabytes = rows[0], rows[0]["bytes"] / 1e6
    lines = [f"{first['title']}, {megabytes:.3g} MB moved at least, {first['allocator']} allocator"]
    for row in rows:
        name = f"  {row['contender']:<22}"
        timed = row["status"] == "timed"
        lines.append(name + (_line(row) if timed else f"{row['status']}: {row['reason']}"))
    return "\n".join(lines) + "\n"


def _line(row: dict) -> str:
    low, high = duration(row["p10_s"]), duration(row["p90_s"])
    share = row["percent_of_copy"]
    line = f"{duration(row['median_s']):>9} ({low} .. {high})".ljust(34)
    line += "" if share is None else f"{row['gb_per_s']:>7.1f} GB/s {share:>5.0f} % of copy"
    ratio = row.get("ratio_to_eager")
    if ratio and row["contender"] not in ("eager", COPY):
        line += f"   {Ratio(**ratio)} vs eager"
    line += f"   {row['tflop_per_s']:.2f} TFLOP/s" if "tflop_per_s" in row else ""
    if "peak_bytes" in row:
        peak, results = row["peak_bytes"] / 1e6, row["result_bytes"] / 1e6
        line += f"   {peak:.0f} MB at most, {results:.0f} of them results"
    inexact = row.get("inexact", "").partition(":")[0]
    return line + (f"   inexact in {inexact}" if inexact else "")


def reasons(results: list[Result]) -> str:
    """Returns why contenders were skipped or refused, each reason once."""
    every = (reason for r in results for reason in (r.skipped | r.refused).items())
    return "\n".join(f"{name}: {reason}" for name, reason in dict.fromkeys(every))


def dump(document: dict) -> str:
    """JSON with one line per row, so that a diff between two runs is readable."""
    parts = []
    for key, value in document.items():
        lines = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else None
        shown = json.dumps(value, indent=1) if lines is None else f"[\n{lines}\n]"
        parts.append(f"{json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
