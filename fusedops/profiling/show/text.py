"""A report as text, for a terminal."""

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fusedops.profiling.reasons import bytes_text, seconds_text
from fusedops.profiling.shares import BOUNDS

if TYPE_CHECKING:
    from fusedops.profiling.advice.advice import Saving

Profile = Any  # of report.py, which imports this file
__all__ = ["NAMES", "saving_text", "text"]

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
BAR = 24  # characters of a whole step
TOP = 6  # operators that are shown


def text(report: Profile) -> str:
    """Everything that a terminal shows, in at most 100 columns."""
    parts = [*_head(report), "", *_verdict(report), "", *_shares(report), *_phases(report)]
    if report.ops:
        parts += ["", *_operators(report)]
    if report.advice:
        parts += ["", *_advice(report)]
    if report.memory:
        parts += ["", *_memory(report)]
    if report.verdict.not_checked:
        parts += ["", "not checked", *(f"  {line}" for line in report.verdict.not_checked)]
    return "\n".join(parts)


def _head(report: Profile) -> Iterator[str]:
    time, machine, about = report.time, report.machine, report.machine.about
    model = [str(about["model"])] if "model" in about else []
    if "parameters" in about:
        model.append(f"{about['parameters'] / 1e6:.3g}M parameters {' '.join(about['dtype'])}")
    words = ["fusedops.profile", *model, f"{time.steps} steps", machine.device]
    yield ", ".join([*words, f"{machine.threads} threads of {machine.cpus:g} CPUs"])
    line = [f"step {seconds_text(time.seconds)} ({_span(time.low, time.high)})"]
    if time.tokens_per_s:
        padding = f" ({time.padding:.0%} padding)" if time.padding else ""
        line.append(f"{time.tokens_per_s:,.0f} tokens/s{padding}")
    elif time.samples_per_s:
        line.append(f"{time.samples_per_s:,.1f} samples/s")
    if time.mfu is not None:
        line.append(f"{time.mfu:.0%} of the matrix products that this machine can do (MFU)")
    yield ", ".join(line)


def _span(low: float, high: float) -> str:
    return f"{seconds_text(low)}..{seconds_text(high)}"


def _verdict(report: Profile) -> Iterator[str]:
    verdict = report.verdict
    if verdict.bounds == ("unknown",):
        yield "VERDICT  unknown"
    else:
        named = [f"{NAMES[b]} {_percent(verdict.shares[b])}" for b in verdict.bounds]
        yield f"VERDICT  {' and '.join(named)} of the step"
    for line in verdict.evidence:
        yield f"  {line}"
    if verdict.next_bounds and verdict.bounds != ("unknown",):
        names = " and ".join(NAMES[bound] for bound in verdict.next_bounds)
        yield f"  without that, the rest would be limited by {names}"


def _percent(share: tuple[float, float, float]) -> str:
    low, middle, high = (100 * value for value in share)
    return f"{middle:.0f} % ({low:.0f}..{high:.0f})"


def _shares(report: Profile) -> Iterator[str]:
    yield "time"
    shares = report.verdict.shares
    for bound in sorted(BOUNDS, key=lambda b: (b == "unknown", -shares[b][1])):
        if shares[bound][1] >= 0.005:
            bar = "█" * max(1, round(BAR * shares[bound][1]))
            yield f"  {NAMES[bound]:31}{_percent(shares[bound]):>18}  {bar}"


def _phases(report: Profile) -> Iterator[str]:
    parts = [f"{name} {seconds_text(s)}" for name, s in report.time.phases.items() if s]
    yield f"  phases: {', '.join(parts)}"
    if report.time.inflation is not None:
        times = f"{report.time.inflation:.2f} times"
        yield f"  torch.profiler made the step {times} as long; no time here contains that"


def _operators(report: Profile) -> Iterator[str]:
    yield f"{'operator':46}{'calls':>6}{'time':>10}{'share':>7}{'possible':>10}  mostly"
    for op in report.ops[:TOP]:
        name = f"{op.name} {op.shapes}"
        name = name if len(name) < 46 else name[:42] + "..."
        numbers = f"{op.calls:>6}{seconds_text(op.seconds):>10}{op.share:>7.0%}"
        yield f"{name:46}{numbers}{seconds_text(op.possible):>10}  {op.bound}"


def _advice(report: Profile) -> Iterator[str]:
    yield f"{'advice':46}{'predicted':>20}{'measured':>30}"
    for number, one in enumerate(report.advice, 1):
        title = f"{number} {one.title}"
        predicted = saving_text(one.predicted) if one.predicted else "by measuring"
        yield f"{title:46}{predicted:>20}{saving_text(one.measured):>30}"
        yield from wrap(one.why, 100, initial_indent="    ", subsequent_indent="    ")


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
    if saving.bytes is not None:
        parts.append(_signed(bytes_text(abs(saving.bytes)), saving.bytes))
    return ", ".join(parts)


def _signed(text: str, saved: float) -> str:
    return f"{'-' if saved >= 0 else '+'}{text}"


def _memory(report: Profile) -> Iterator[str]:
    assert report.memory is not None
    yield "memory"
    for category, size in sorted(report.memory.items(), key=lambda item: -item[1]):
        yield f"  {category:31}{bytes_text(size):>12}"
