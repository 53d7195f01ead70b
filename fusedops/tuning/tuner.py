"""Runs the trials of `fusedops.tune`: each change on top of the changes already kept."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from fusedops.measuring.alternate import TooSlow
from fusedops.measuring.memory.measured import measure_memory
from fusedops.measuring.quantiles import FEWEST, quantile
from fusedops.measuring.ratios import Ratio, expanded, paired_ratio
from fusedops.measuring.sampling import Samples, Timed, sample
from fusedops.measuring.snapshot import Snapshot
from fusedops.measuring.units import seconds_text
from fusedops.profiling.collect.series import Phases
from fusedops.tuning.knobs import KNOBS, SMALLER, Knob, TunedStep
from fusedops.tuning.rules import Limits, MeasuredSetting, judge
from fusedops.tuning.running import Running
from fusedops.tuning.setting import Setting
from fusedops.tuning.trial import Trial

__all__ = ["Tuner"]

LOSS_STEPS = 4  # steps after which the losses are compared
WARMUP = 2
SHORT = 3  # rounds of a trial, where the budget has no time for the fewest
REPEATS = 0.2  # of the last comparison: time for rounds that other programs disturbed


@dataclass
class Tuner:
    """The trials of one call. end: when trials must be done. deadline: when everything must be.

    The first trial may take until the deadline, because it compares with the baseline itself.

    sorts: whether to try the knobs with the largest expected gain first. missing: seconds of the
    trials that the time was too short for.
    """

    subject: TunedStep
    make_batch: Callable[[int, int | None], Any]
    length: int | None
    goal: str
    limits: Limits
    end: float
    deadline: float
    knobs: int = len(KNOBS)
    size: int = 0  # samples of the baseline's batch
    baseline_loss: float = 0.0
    sorts: bool = False
    missing: float = 0.0
    has_tried: bool = False

    def trials(self, start: Setting, names: list[str], kept: Snapshot) -> Iterator[Trial]:
        """The baseline, then a trial of each knob, then of smaller batches if p95 asks for them."""
        self.size = start.batch
        batches = [self._batch(start.batch) for _ in range(LOSS_STEPS)]
        self._check_loss(batches[0])
        trial = best = self._baseline(start, batches, kept)
        yield best
        if self.sorts:
            names = sorted(names, key=lambda name: -KNOBS[name].gain(self.subject))
        for i, name in enumerate(names):
            share = (self.end - perf_counter()) / (len(names) - i + self._smaller())
            again = True
            while again:
                trial = self._tried(KNOBS[name], best, batches, kept, share)
                yield trial
                again = trial.kept and name == "micro_batch"
                best = trial if trial.kept else best
        while self.limits.over_p95(best.measured) and best.setting.batch > 1:
            share = (self.end - perf_counter()) / 2
            trial = self._tried(SMALLER, best, batches, kept, share)
            yield trial
            if not trial.kept:
                return
            best = trial

    def _smaller(self) -> int:
        """Trials for which time is kept: of smaller batches, where p95 may ask for them."""
        return 0 if self.limits.p95 is None else 2

    def final(self, kept: list[Trial]) -> Ratio:
        """The winner against the baseline, in turns; 1 if nothing was kept."""
        base, best = kept[0].setting, kept[-1].setting
        if base == best:
            return Ratio(1.0, 1.0, 1.0)
        in_time = self._has_time_for(2 * (WARMUP + FEWEST) * kept[0].measured.seconds)
        if len(kept) == 2 and kept[-1].ratio is not None and not in_time:
            return kept[-1].ratio
        runs = [self._running(base), self._running(best)]
        start = perf_counter()
        for run in runs * WARMUP:
            run()
        end = self.deadline - (perf_counter() - start) / WARMUP  # no round begins after it
        seconds = (1 - REPEATS) * max(0.0, end - perf_counter())
        before, after = sample(runs, None, seconds, math.inf, end)
        return self._ratio(base, before, best, after)

    def _batch(self, batch: int) -> Any:
        inputs = self.make_batch(batch, self.length)
        whole = isinstance(inputs, Mapping) and all(
            isinstance(t, torch.Tensor) for t in inputs.values()
        )
        if not whole:
            raise TypeError(
                f"tune: make_batch must give a dictionary of tensors, got {type(inputs).__name__}"
            )
        return dict(inputs)

    def _check_loss(self, batch: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            loss = getattr(self.subject.model(**batch), "loss", None)
        if loss is None:
            raise ValueError(
                "tune: model must give a loss: make_batch's batch needs labels, got "
                f"{', '.join(batch)}"
            )

    def _running(self, setting: Setting) -> Running:
        return Running(setting, self.subject, self.make_batch, self.length)

    def _baseline(self, setting: Setting, batches: list[Any], kept: Snapshot) -> Trial:
        start = perf_counter()
        loss, run = self._loss(setting, batches, kept), self._running(setting)
        step = (perf_counter() - start) / LOSS_STEPS
        in_time = self._has_time_for((WARMUP + 1 + FEWEST + _steps(SHORT)) * step)
        rounds = FEWEST if in_time else SHORT  # else no trial has time either
        peak = self._prepared(run, rounds)
        share = (self.end - perf_counter()) / (1 + self.knobs + self._smaller()) * in_time
        stepping: list[float] = []

        def timed(batch: Any) -> Timed:
            phases.reset()
            result = run(batch)
            stepping.append(phases.optimizer)
            return result

        try:
            with Phases(None) as phases:
                (samples,) = sample([timed], None, share, self.end, fewest=rounds)
        except TooSlow as error:
            steps = LOSS_STEPS + WARMUP + 2 + FEWEST + _steps(FEWEST)
            enough = math.ceil(1.1 * steps * step)
            raise ValueError(
                f"tune: budget_s must be enough for more steps: {error}; budget_s={enough} "
                f"(--budget {enough}) has time for a trial"
            ) from error
        self.baseline_loss = loss
        self.subject = replace(
            self.subject,
            input_share=self._input_share(setting, samples),
            optimizer_share=median(stepping) / median(samples.seconds),
        )
        measured = _measured(samples, peak)
        return Trial("baseline", setting, measured, loss=loss, baseline_loss=loss, kept=True)

    def _input_share(self, setting: Setting, samples: Samples) -> float:
        """Of the step, that make_batch takes."""
        times = []
        for _ in range(LOSS_STEPS):
            start = perf_counter()
            self._batch(setting.batch)
            times.append(perf_counter() - start)
        return median(times) / median(samples.seconds)

    def _loss(self, setting: Setting, batches: list[Any], kept: Snapshot) -> float:
        """After a few steps from the user's parameters and generators."""
        kept.restore()
        try:
            return self._running(setting).loss(batches, self.size)
        finally:
            kept.restore()

    def _prepared(self, run: Running, rounds: int) -> int:
        """The bytes of a step at its peak; warms up before so many rounds."""
        for _ in range(_warmup(rounds)):
            run()
        return measure_memory(run, model=run.model, optimizer=run.optimizer).peak

    def _tried(
        self,
        knob: Knob,
        best: Trial,
        batches: list[Any],
        kept: Snapshot,
        seconds: float,
    ) -> Trial:
        """Turns a knob on the current setting, and compares both in turns."""
        setting, name = best.setting, knob.change.name
        if why := knob.without(self.subject, setting):
            return Trial(name, setting, why=why)
        rounds = FEWEST if self._has_time(FEWEST, best) else SHORT
        if not self._has_time(rounds, best):
            needed = _steps(FEWEST) * best.measured.seconds
            self.missing += needed
            return Trial(name, setting, why=f"the budget has no {seconds_text(needed)} left for it")
        turned = knob.turn(setting)
        start = perf_counter()
        try:
            loss = self._loss(turned, batches, kept)
            runs = [self._running(setting), self._running(turned)]
            peaks = [self._prepared(run, rounds) for run in runs]
            left = max(0.0, seconds - (perf_counter() - start))
            samples = sample(runs, None, left, self._end, fewest=rounds)
            self.has_tried = True
        except TooSlow as error:
            self.missing += _steps(FEWEST) * best.measured.seconds
            return Trial(name, setting, why=str(error))
        except Exception as error:  # noqa: BLE001 - the user's model under a change may raise anything
            return Trial(name, setting, why=f"the step raised {type(error).__name__}: {error}")
        before, after = map(_measured, samples, peaks)
        ratio = self._ratio(setting, samples[0], turned, samples[1])
        is_kept, why = judge(before, after, ratio, self.limits, knob.least)
        return Trial(
            name,
            turned,
            after,
            ratio,
            loss,
            self.baseline_loss,
            knob.change.results,
            is_kept,
            why,
        )

    def _ratio(self, base: Setting, before: Samples, other: Setting, after: Samples) -> Ratio:
        """Of samples a second, or of steps a second for goal "latency"."""
        sizes = (base.batch, other.batch) if self.goal == "throughput" else (1, 1)
        pairs = zip(sizes, (before, after), strict=True)
        first, second = ([s / size for s in samples.seconds] for size, samples in pairs)
        ratio = paired_ratio(first, second)
        return ratio if len(first) >= FEWEST else expanded(ratio, len(first))

    def _has_time(self, rounds: int, best: Trial) -> bool:
        """Whether a trial of so many rounds ends in time, if its step takes as long as the best."""
        return perf_counter() + _steps(rounds) * best.measured.seconds <= self._end

    @property
    def _end(self) -> float:
        return self.end if self.has_tried else self.deadline

    def _has_time_for(self, seconds: float) -> bool:
        return perf_counter() + seconds <= self.deadline


def _steps(rounds: int) -> int:
    """Steps of a trial: for the loss, to prepare two settings, and its rounds."""
    return LOSS_STEPS + 2 * (_warmup(rounds) + 1) + 2 * rounds


def _warmup(rounds: int) -> int:
    """Steps before the one that measures memory, which is the only one where time is short."""
    return WARMUP if rounds >= FEWEST else 0


def _measured(samples: Samples, peak: int) -> MeasuredSetting:
    return MeasuredSetting(median(samples.seconds), quantile(samples.seconds, 0.95), peak)
