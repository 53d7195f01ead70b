"""A profile report as text, for a terminal."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fusedops.measuring.units import bytes_text, count_text, seconds_text
from fusedops.profiling.evidence import Evidence, Gpu
from fusedops.profiling.judge import THRESHOLDS
from fusedops.profiling.shares import BOUNDS
from fusedops.profiling.show.numbers import mebibytes, percent, share_text, span_text, times

if TYPE_CHECKING:
    from fusedops.profiling.advice.advice import Advice, Saving

Profile = Any  # of report.py, which imports this file
__all__ = [
    "CATEGORIES",
    "NAMES",
    "OUTSIDE",
    "parameters_text",
    "phases_text",
    "predicted_text",
    "saving_text",
    "shown_bounds",
    "sizes_of",
    "text",
]

# How a bound is called in a sentence.
NAMES = {
    "input": "input",
    "launch": "launches and Python",
    "memory": "memory bandwidth",
    "compute": "compute",
    "kernels": "slow kernels",
    "allocation": "allocation",
    "threads": "too many threads or throttling",
    "sync": "waits for the GPU",
    "communication": "communication",
    "unknown": "unexplained",
}
PHASES = {"input": "wait for data", "other": "backward and the rest"}
OUTSIDE = "(outside of the model)"
CATEGORIES = {
    "peak": "peak of a step",
    "frozen": "parameters that are frozen",
    "slack": "of the process, not of the step",
}
WIDTH = 100  # columns
BAR = 24  # characters of a whole step
TOP = 6  # modules and operators that are shown
UPPER_BOUNDS = ("at most", "an upper bound")  # with which a prediction's formula begins
MEASURING = "measuring "  # so begins a line on a change that was not measured
OF_STEPS = ("input", "threads")  # bounds that are measured in every step of a loop


def text(report: Profile) -> str:
    """Everything that a terminal shows, in at most 100 columns."""
    parts = [*_head(report), "", *_verdict(report), "", *_shares(report), *_phases(report)]
    if report.evidence.gpu is not None:
        parts += ["", *_gpu(report.evidence.gpu)]
    if report.ops:
        parts += ["", *_modules(report), "", *_operators(report)]
    if report.advice:
        parts += ["", *_advice(report)]
    if report.memory:
        parts += ["", *_memory(report)]
    if report.verdict.not_checked:
        reasons = _grouped(report.verdict.not_checked)
        parts += ["", "not checked", *(line for reason in reasons for line in _wrapped(reason))]
    return "\n".join(parts)


def _grouped(not_checked: Iterable[str]) -> Iterator[str]:
    """The lines; changes that were not measured for the same reason share one, the last."""
    changes: dict[str, list[str]] = defaultdict(list)
    for line in not_checked:
        name, _, reason = line.partition(": ")
        if name.startswith(MEASURING):
            changes[reason].append(name.removeprefix(MEASURING))
        else:
            yield line
    for reason, names in changes.items():
        yield f"{MEASURING}{', '.join(names)}: {reason}"


def _wrapped(line: str, indent: int = 2) -> list[str]:
    """Lines of at most WIDTH; those after the first are indented further."""
    first, later = " " * indent, " " * (indent + 2)
    wrap = textwrap.TextWrapper(WIDTH, initial_indent=first, subsequent_indent=later)
    return wrap.wrap(line)


def _head(report: Profile) -> Iterator[str]:
    time, machine = report.time, report.machine
    words = ["fusedops.profile", parameters_text(report), count_text(time.steps, "step")]
    yield ", ".join(filter(None, words))
    if optimizers := machine.about.get("optimizers"):
        yield from _wrapped(f"optimizers: {', '.join(optimizers)}", 0)
    threads, cpus = count_text(machine.threads, "thread"), count_text(machine.cpus, "CPU")
    yield f"{machine.device}, {threads} on {cpus}"
    line = [f"step {seconds_text(time.seconds)} ({span_text(time.low, time.high)})"]
    if time.tokens_per_s:
        padding = f" ({share_text(time.padding)} padding)" if time.padding else ""
        line.append(f"{time.tokens_per_s:,.0f} tokens/s{padding}")
    elif time.samples_per_s:
        line.append(f"{time.samples_per_s:,.1f} samples/s")
    if time.mfu is not None:
        line.append(f"MFU {share_text(time.mfu)} of this machine's measured peak")
    yield ", ".join(line)


def parameters_text(report: Profile) -> str:
    """Llama, 10.8M parameters bfloat16; empty without a model."""
    about = report.machine.about
    words = [str(about["model"])] if "model" in about else []
    if "parameters" in about:
        count = about["parameters"]
        shown = f"{count / 1e6:.3g}M" if count >= 1e5 else f"{count:,}"
        words.append(f"{shown} parameters {' '.join(about['dtype'])}")
    return ", ".join(words)


def _verdict(report: Profile) -> Iterator[str]:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        yield "VERDICT  unknown"
    else:
        named = [f"{NAMES[b]} {_share(report, b)}" for b in verdict.bounds]
        yield f"VERDICT  {' and '.join(named)} of the step"
    for line in verdict.evidence:
        yield from _wrapped(line)
    if verdict.next_bounds and verdict.bounds != ("unknown",):
        names = " and ".join(NAMES[bound] for bound in verdict.next_bounds)
        yield f"  without that, the rest would be limited by {names}"


def _shares(report: Profile) -> Iterator[str]:
    yield f"{'time':33}{'share (95 %)':>18}{'named from':>13}"
    shares = report.verdict.shares
    for bound in shown_bounds(report):
        bar = "█" * max(1, round(BAR * shares[bound][1]))
        limit = share_text(THRESHOLDS[bound]) if bound in THRESHOLDS else ""
        yield f"  {NAMES[bound]:31}{_share(report, bound):>18}{limit:>13}  {bar}"
    if _is_of_one_step(report.evidence):
        yield "  shares without an interval come from one recorded step"


def _share(report: Profile, bound: str) -> str:
    """With its 95 % interval, where steps were drawn."""
    share = report.verdict.shares[bound]
    if bound not in OF_STEPS and _is_of_one_step(report.evidence):
        return share_text(share[1])
    return percent(share)


def _is_of_one_step(evidence: Evidence) -> bool:
    """Whether a loop's operators were recorded in a single step."""
    profiled = evidence.profiled
    return evidence.recorded and profiled is not None and len(profiled.seconds) == 1


def shown_bounds(report: Profile) -> list[str]:
    """Bounds with a share to show, the largest first; what is unexplained comes last."""
    shares = report.verdict.shares
    order = sorted(BOUNDS, key=lambda b: (b == "unknown", -shares[b][1]))
    return [bound for bound in order if shares[bound][1] >= 0.005]


def phases_text(report: Profile) -> str:
    """forward 1.2 ms, optimizer 0.3 ms: the phases of a step that take time."""
    phases = report.time.phases.items()
    return ", ".join(f"{PHASES.get(name, name)} {seconds_text(s)}" for name, s in phases if s)


def sizes_of(report: Profile) -> dict[str, int]:
    """Category -> bytes of a step: the peak, then what each holds at most, the largest first."""
    sizes = {name: size for name, size in (report.memory or {}).items() if size and name != "slack"}
    order = sorted(sizes, key=lambda name: (name != "peak", -sizes[name]))
    return {CATEGORIES.get(name, name.replace("_", " ")): sizes[name] for name in order}


def _phases(report: Profile) -> Iterator[str]:
    yield f"  phases: {phases_text(report)}"
    if report.time.inflation is not None:
        slower = f"{report.time.inflation:.2f} times"
        yield f"  torch.profiler made the step {slower} as long; no time here contains that"


def _modules(report: Profile) -> Iterator[str]:
    rows = report.modules[:TOP]
    unit, seconds = times([row.seconds for row in rows])
    yield f"{'module, its forward and backward':60}{unit:>10}{'share':>8}"
    for row, time in zip(rows, seconds, strict=True):
        yield f"  {_cut(row.name or OUTSIDE, 56):58}{time:>10}{share_text(row.share):>8}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    yield (
        f"GPU  busy {gpu.busy:.0%}, the host waits {gpu.host_waits:.0%}, {gpu.kernels} kernels, "
        f"median {seconds_text(gpu.median_kernel)}"
    )
    copies = gpu.copies
    if copies.pinned or copies.pageable:
        yield (
            f"  copied to it: {bytes_text(copies.pinned)} pinned, {bytes_text(copies.pageable)} "
            f"pageable, {seconds_text(copies.exposed)} without other work"
        )
    if gpu.reserved is not None:
        reserved = gpu.reserved
        yield (
            f"  allocator: {bytes_text(reserved.allocated)} of {bytes_text(reserved.reserved)} in "
            f"use, {bytes_text(reserved.peak_allocated)} at most so far, {gpu.mallocs:.3g} "
            f"cudaMalloc and {gpu.alloc_retries:.3g} retries a step"
        )


def _operators(report: Profile) -> Iterator[str]:
    rows = report.ops[:TOP]
    unit, numbers = times([s for row in rows for s in (row.seconds, row.possible)])
    yield f"{'operator':44}{'calls':>6}{unit:>10}{'share':>8}{'possible':>10}  mostly"
    for row, time, possible in zip(rows, numbers[::2], numbers[1::2], strict=True):
        name = _cut(f"{row.name} {row.shapes}", 40)
        line = f"  {name:42}{row.calls:>6}{time:>10}{share_text(row.share):>8}{possible:>10}"
        yield f"{line}  {NAMES[row.bound]}"
    yield "  possible: at this machine's measured peak and bandwidth"


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _advice(report: Profile) -> Iterator[str]:
    measured = any(advice.measured for advice in report.advice)
    width, predicted = (40, 22) if measured else (74, 26)
    yield f"{'advice':{width}}{'predicted':>{predicted}}" + (
        f"{'measured':>38}" if measured else ""
    )
    for number, advice in enumerate(report.advice, 1):
        title = _cut(f"{number} {advice.title}", width - 2)
        line = f"{title:{width}}{predicted_text(advice):>{predicted}}"
        yield f"{line} {saving_text(advice.measured):>37}".rstrip()
        yield from _wrapped(f"why: {advice.why}", 4)
        yield from _wrapped(f"how: {advice.how}", 4)
    ids = [f'"{name}"' for name in report.measurable]
    if ids:
        yield from _wrapped(f"report.measure({', '.join(ids)}) tries them here and undoes them")


def predicted_text(advice: "Advice") -> str:
    """A predicted saving; an upper bound says so, until the saving is measured."""
    if advice.predicted is None:
        return "no prediction"
    is_bound = advice.measured is None and advice.formula.startswith(UPPER_BOUNDS)
    return saving_text(advice.predicted) + (" at most" if is_bound else "")


def saving_text(saving: "Saving | None") -> str:
    """-1.2 ms (-1.4..-1.0), -61 MiB: what a step loses; a plus sign is a loss for the user."""
    if saving is None:
        return ""
    parts = []
    if saving.seconds is not None:
        parts.append(_signed(seconds_text(abs(saving.seconds)), saving.seconds))
        if saving.interval is not None:
            low, high = (-1e3 * value for value in reversed(saving.interval))
            parts[-1] += f" ({low:.3g}..{high:.3g} ms)"
    if saving.bytes:
        parts.append(_signed(bytes_text(abs(saving.bytes)), saving.bytes))
    return ", ".join(parts)


def _signed(text: str, saved: float) -> str:
    return f"{'-' if saved >= 0 else '+'}{text}"


def _memory(report: Profile) -> Iterator[str]:
    """The peak first, then what categories hold at most, then what the process holds beyond."""
    assert report.memory is not None
    yield f"{'memory, at most at any time':33}{'MiB':>18}"
    slack = {CATEGORIES["slack"]: report.memory.get("slack", 0)}
    for name, size in (sizes_of(report) | slack).items():
        if size:
            yield f"  {name:31}{mebibytes(size):>18}"
