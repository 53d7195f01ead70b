"""The result of `fusedops.profile`: numbers as attributes, and methods to show and save them."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from fusedops.measuring.quantiles import median_interval, quantile
from fusedops.measuring.snapshot import Snapshot
from fusedops.profiling.advice.advice import Advice
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.advice.trial import ALL, ALL_SAFE, needed_seconds, tried, why_not
from fusedops.profiling.collect.experiments import ProfiledStep
from fusedops.profiling.evidence import Ceilings, Evidence, Loader, Op, Run, from_json
from fusedops.profiling.judge import Verdict, judge
from fusedops.profiling.shares import ideal, op_parts, op_seconds, working_ceilings

__all__ = ["Input", "Machine", "ModuleTime", "OpTime", "Profile", "Time"]


@dataclass(frozen=True)
class Time:
    """A step's time, in seconds, from steps without a profiler.

    seconds: the median, with its 95 % interval low..high. p95: None below 20 steps. phases:
    "input", "forward", "optimizer" and "other" (the backward, the loss and the rest) -> median
    seconds. tokens_per_s counts real tokens; padding is the share of the others. flops: of a step.
    mfu: share of the step in which this machine's matrix products would do the same arithmetic.
    inflation: how many times slower a step is under torch.profiler. interrupted: share of the time
    in which other programs had the CPU; it is part of `seconds` and `mfu`, and left out of other
    shares.
    """

    seconds: float
    low: float
    high: float
    steps: int
    p95: float | None
    phases: dict[str, float]
    tokens_per_s: float | None
    samples_per_s: float | None
    padding: float | None
    flops: int | None
    mfu: float | None
    inflation: float | None
    interrupted: float


@dataclass(frozen=True)
class OpTime:
    """An operator's calls of one kind in a step. bound: the limit that most of their time goes to.

    seconds: of a step, scaled to steps without a profiler; on a GPU of its kernels. possible:
    seconds at this machine's ceilings. share: of the step, the wait for data left out.
    """

    name: str
    shapes: str
    dtype: str
    module: str
    calls: int
    seconds: float
    share: float
    possible: float
    flops: int
    bytes: int
    bound: str


@dataclass(frozen=True)
class ModuleTime:
    """What a module's own operators take in a step, without submodules. Layers are one row."""

    name: str
    seconds: float
    share: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Input:
    """How the data keeps up with the step.

    wait: seconds per step spent waiting for data. loader: its own speed. step_batches_per_s: what
    the step could consume.
    """

    wait: float
    loader: Loader | None
    step_batches_per_s: float


@dataclass(frozen=True)
class Machine:
    """Where it was measured, and what that machine reaches."""

    device: str
    threads: int
    cpus: float
    ceilings: Ceilings | None
    about: dict[str, Any] = field(default_factory=dict)


class Profile:
    """Where a step's time goes. `print(report)` shows it; times are seconds, sizes are bytes.

    verdict: which resource limits the step. evidence: everything that was measured. Made by
    `fusedops.profile` and `fusedops.recording`, and from a file by `Profile.load`.
    """

    def __init__(
        self,
        evidence: Evidence,
        verdict: Verdict | None = None,
        subject: ProfiledStep | None = None,
        call: Callable[[], Any] | None = None,
    ) -> None:
        self.evidence = evidence
        self.verdict = verdict or judge(evidence)
        self._subject, self._call = subject, call
        self._advice: list[Advice] | None = None

    @cached_property
    def time(self) -> Time:
        return _time(self.evidence)

    @property
    def memory(self) -> dict[str, int] | None:
        """Category -> bytes; None where it was not measured."""
        return self.evidence.memory

    @cached_property
    def ops(self) -> list[OpTime]:
        """The operators, those with the most time first; empty without a table of operators."""
        return _ops(self.evidence)

    @cached_property
    def modules(self) -> list[ModuleTime]:
        """Time by module, most first."""
        return _modules(self.ops)

    @cached_property
    def input(self) -> Input:
        base = self.evidence.cached or self.evidence.plain
        wait = median(self.evidence.plain.wait) if self.evidence.plain.wait else 0.0
        return Input(wait, self.evidence.loader, 1 / median(base.seconds))

    @cached_property
    def machine(self) -> Machine:
        evidence = self.evidence
        device = str(evidence.about.get("device", evidence.device))
        return Machine(device, evidence.threads, evidence.cpus, evidence.ceilings, evidence.about)

    @property
    def advice(self) -> list[Advice]:
        """What would help, the largest gain first."""
        if self._advice is None:
            self._advice = advise(self.evidence, self.verdict)
        return sorted(self._advice, key=lambda piece: -piece.gain)

    @property
    def measurable(self) -> list[str]:
        """Ids of the advice that `measure` can try here and did not yet."""
        if self._call is None or self._subject is None:
            return []
        subject = self._subject
        return [
            advice.id
            for advice in self.advice
            if advice.measured is None
            and advice.id in ALL
            and not why_not(advice.id, subject, self.evidence)
        ]

    def measure(self, *ids: str, budget_s: float = 60.0) -> list[Advice]:
        """Tries changes on the live step, and returns their advice with `measured`.

        ids: "patch", "loss", "checkpoint", "quantize_lora", "adamw8bit", "fused_adamw", "bf16",
        "threads", "workers" or "keep_freed_memory". Blocks of steps with a change and without it
        alternate; for "workers" they are blocks of the loop, and the DataLoader's dataset is read
        again. Then the change is undone, and parameters, buffers, optimizer state and generators
        are what they were. Only `keep_freed_memory` leaves the C library with its default setting.
        `measured.bytes` is the difference of two steps' peaks, where a change moves memory.
        budget_s: seconds for all of them; the change with the largest predicted gain comes first. A
        change that the budget has no time for, or that makes the step raise, has `measured=None`;
        `verdict.not_checked` says why, how long it takes, and which budget_s has time for all.

        Raises ValueError for an id that cannot be tried on this step, with the reason, and
        RuntimeError for a report that was loaded or recorded.
        """
        if self._call is None or self._subject is None:
            raise RuntimeError("profile: measure needs a report that fusedops.profile made here")
        by_id = {advice.id: advice for advice in self.advice}
        for name in ids:
            others = f"it must be one of {', '.join(ALL)}"
            reason = why_not(name, self._subject, self.evidence) if name in ALL else others
            if reason:
                raise ValueError(f"profile: measure cannot try {name!r}: {reason}")
        gains = {name: by_id[name].gain if name in by_id else 0.0 for name in ids}
        needed = {name: needed_seconds(name, self.evidence) for name in ids}
        enough = f"; a budget of {math.ceil(1.1 * sum(needed.values()))} s has time for all"
        deadline = perf_counter() + budget_s
        for done, name in enumerate(sorted(ids, key=lambda name: -gains[name])):
            left = deadline - perf_counter()
            share = max(left / (len(ids) - done), min(left, needed[name]))
            saving, reason = tried(name, self._subject, self.evidence, self._call, share)
            reason += enough if reason.startswith("the budget") else ""
            base = by_id.get(name) or Advice(name, name, "it was asked for", "", "")
            by_id[name] = replace(base, measured=saving)
            self._not_measured(name, reason)
        self._advice = list(by_id.values())
        return [by_id[name] for name in ids]

    def measure_safe(self, budget_s: float) -> None:
        """Measures the advice that leaves nothing behind, as far as it can be tried here."""
        ids = []
        for advice in self.advice:
            if advice.id in ALL_SAFE and self._subject is not None:
                reason = why_not(advice.id, self._subject, self.evidence)
                self._not_measured(advice.id, reason)
                ids += [advice.id] if not reason else []
        self.measure(*ids, budget_s=budget_s)

    def take_measured(self, other: "Profile") -> None:
        """Takes what another report of the same step has measured."""
        by_id = {advice.id: advice for advice in self.advice}
        for advice in other.advice:
            if advice.measured is not None:
                by_id[advice.id] = replace(by_id.get(advice.id, advice), measured=advice.measured)
        self._advice = list(by_id.values())

    def _not_measured(self, name: str, reason: str) -> None:
        """Notes why a change was not measured; without a reason, removes an earlier note."""
        about = f"measuring {name}: "
        lines = [line for line in self.evidence.not_checked if not line.startswith(about)]
        lines += [about + reason] if reason else []
        self.evidence = replace(self.evidence, not_checked=tuple(lines))
        self.verdict = replace(self.verdict, not_checked=tuple(lines))

    def to_dict(self) -> dict[str, Any]:
        """The evidence, the verdict and the advice, as json.dumps takes them."""
        return {
            "evidence": self.evidence.to_dict(),
            "verdict": asdict(self.verdict),
            "advice": [asdict(advice) for advice in self.advice],
        }

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON. `Profile.load` and `fusedops.compare` read it."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """A saved report, judged again. It cannot trace. Raises ValueError for another file."""
        values = json.loads(Path(path).read_text())
        if not isinstance(values, dict) or "evidence" not in values:
            raise ValueError(f"profile: {path} must be a saved report, it has no evidence")
        return Profile.from_dict(values)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Profile":
        """The report whose `to_dict` this is, judged again."""
        report = Profile(Evidence.from_dict(values["evidence"]))
        report._advice = [from_json(Advice, advice) for advice in values.get("advice", [])]
        return report

    def trace(self, path: str | Path) -> int:
        """Runs one more step under torch.profiler, and writes its trace for Perfetto.

        Parameters, optimizer state and generators are put back. Returns the file's size in bytes,
        about 500 for each of the profiler's events. Raises RuntimeError for a report that was
        loaded or recorded, since it has no step to run.
        """
        if self._call is None or self._subject is None:
            raise RuntimeError("profile: trace needs a report that fusedops.profile made here")
        import torch

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        cpu = torch.profiler.ProfilerActivity.CPU
        activities = torch.profiler.supported_activities() if self.evidence.gpu else [cpu]
        with (
            Snapshot(self._subject.model, self._subject.optimizer),
            torch.profiler.profile(activities=activities, record_shapes=True) as profiled,
        ):
            self._call()
        profiled.export_chrome_trace(str(path))
        return Path(path).stat().st_size

    def html(self, path: str | Path) -> None:
        """Writes one HTML file that needs no script and no other file; needs jinja2."""
        from fusedops.profiling.show.page import page

        page(self, path)

    def plot(self, path: str | Path) -> None:
        """Writes a figure with a panel for time and one for memory; needs matplotlib."""
        from fusedops.profiling.show.figure import plot

        plot(self, path)

    def __str__(self) -> str:
        from fusedops.profiling.show.text import text

        return text(self)

    def __repr__(self) -> str:
        return f"<Profile: {self.verdict}, step {self.time.seconds:.4g} s>"


def _time(evidence: Evidence) -> Time:
    run, tokens = evidence.plain, evidence.tokens
    seconds = median(run.seconds)
    low, high = median_interval(run.seconds)
    profiled = evidence.profiled
    base = median((evidence.cached or run).running)
    padding = None
    if tokens.real is not None and tokens.padded:
        padding = 1.0 - tokens.real / tokens.padded
    return Time(
        seconds=seconds,
        low=low,
        high=high,
        steps=len(run.seconds),
        p95=quantile(run.seconds, 0.95),
        phases=_phases(run),
        tokens_per_s=tokens.real / seconds if tokens.real is not None else None,
        samples_per_s=tokens.samples / seconds if tokens.samples else None,
        padding=padding,
        flops=sum(evidence.flops.values()) if evidence.flops is not None else None,
        mfu=_mfu(evidence, seconds),
        inflation=median(profiled.running) / base if profiled and profiled.events else None,
        interrupted=1.0 - sum(run.running) / sum(run.seconds),
    )


def _phases(run: Run) -> dict[str, float]:
    parts = {"input": run.wait, "forward": run.forward, "optimizer": run.optimizer}
    phases = {name: median(values) if values else 0.0 for name, values in parts.items()}
    return phases | {"other": max(0.0, median(run.seconds) - sum(phases.values()))}


def _mfu(evidence: Evidence, seconds: float) -> float | None:
    if evidence.flops is None or evidence.ceilings is None:
        return None
    peaks = evidence.ceilings.flops
    return sum(n / peaks[dtype] for dtype, n in evidence.flops.items() if dtype in peaks) / seconds


def _ops(evidence: Evidence) -> list[OpTime]:
    seconds_by_op, ceilings = op_seconds(evidence), working_ceilings(evidence)
    if seconds_by_op is None or ceilings is None:
        return []
    step = sum(seconds_by_op[0].values()) + seconds_by_op[1]
    rows = [_op_time(op, seconds, ceilings, step) for op, seconds in seconds_by_op[0].items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _op_time(op: Op, seconds: float, ceilings: Ceilings, step: float) -> OpTime:
    parts = op_parts(op, seconds, ceilings)
    return OpTime(
        op.name,
        op.shapes,
        op.dtype,
        op.module,
        op.calls,
        seconds,
        seconds / step,
        min(seconds, max(ideal(op, ceilings))),
        op.flops,
        op.bytes,
        max(parts, key=lambda bound: parts[bound]),
    )


def _modules(ops: list[OpTime]) -> list[ModuleTime]:
    of: dict[str, list[OpTime]] = defaultdict(list)
    for op in ops:
        of[op.module].append(op)
    rows = [
        ModuleTime(
            name,
            sum(op.seconds for op in inside),
            sum(op.share for op in inside),
            sum(op.flops for op in inside),
            sum(op.bytes for op in inside),
        )
        for name, inside in of.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)
