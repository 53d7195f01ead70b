"""Times a profile's steps: unchanged, on kept batches, on half batches, and on fewer threads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from fusedops.measuring.alternate import rotated
from fusedops.measuring.clock import wall_seconds
from fusedops.measuring.driver import Driver
from fusedops.profiling.collect.batches import halve, mean_tokens, nbytes
from fusedops.profiling.collect.data import KEPT_BYTES, Data
from fusedops.profiling.collect.gpu.allocator import Allocations, allocations
from fusedops.profiling.collect.series import Phases, Series, Withheld
from fusedops.profiling.evidence import Evidence, Loader, Run, Tokens

__all__ = ["StepsPlan", "measure_steps"]

FEWEST = 5  # what a verdict needs


@dataclass
class StepsPlan:
    """How many steps to run, until when (of `perf_counter`), and what to call after each one.

    count: the tokens of a batch, or of a step without data. driver: the GPU to use, if any.
    """

    steps: int
    warmup: int
    deadline: float
    on_step: Callable[[], None] = lambda: None
    count: Callable[[Any], Tokens] = lambda batch: Tokens()
    driver: Driver = field(default_factory=Driver)

    def has_time_for(self, seconds: float) -> bool:
        return perf_counter() + seconds < self.deadline


def measure_steps(
    step: Callable[..., Any], data: Data | None, phases: Phases, plan: StepsPlan, cpus: float
) -> tuple[Evidence, Callable[[], Any], Allocations | None]:
    """Warms up and runs the steps.

    Returns what they showed, a step on a kept batch of the usual size, and what all of them
    allocated on the GPU after the warm-up. With a synchronous loader each round has a plain step,
    the same batch again and half of it, so that a slower moment of the machine meets all three. A
    loader with workers runs on while other steps run, so there the kinds come one after the other.
    A step's error is raised with a note that says where. Raises ValueError if the data is empty.
    """
    if data is None:
        (evidence, allocated), call = _without_data(step, phases, plan), step
    else:
        evidence, allocated = _with_data(step, data, phases, plan)
        call = _again(step, _usual(data.kept))
    fewer = _fewer_threads(call, phases, plan, cpus)
    threads = torch.get_num_threads()
    return replace(evidence, fewer_threads=fewer, threads=threads, cpus=cpus), call, allocated


def _with_data(
    step: Callable[..., Any], data: Data, phases: Phases, plan: StepsPlan
) -> tuple[Evidence, Allocations | None]:
    rounds = _Rounds(step, data, phases, plan, _warm_up(step, data, plan))
    before, held = plan.driver.stats(), Withheld()
    if data.asynchronous:
        rounds.one_after_the_other()
    else:
        rounds.interleaved()
    evidence = rounds.evidence(*held.shares())
    return evidence, allocations(before, plan.driver.stats(), rounds.steps)


def _usual(batches: Sequence[Any]) -> Any:
    """The batch of median size, so that a short last one does not stand for the others."""
    return sorted(batches, key=nbytes)[len(batches) // 2]


class _Rounds:
    """The runs of one profile with data."""

    def __init__(
        self, step: Callable[..., Any], data: Data, phases: Phases, plan: StepsPlan, longest: float
    ) -> None:
        self.step, self.data, self.plan, self.longest = step, data, plan, longest
        paired = not data.asynchronous
        self.plain, self.cached, self.half = (Series(phases, paired, plan.driver) for _ in range(3))
        self.last: Any = None  # batch
        self.loader: Loader | None = None
        self.counted: list[Tokens] = []
        self.not_checked: list[str] = []
        self._halving = self._has_time = True

    @property
    def steps(self) -> int:
        """How many steps ran, of all kinds."""
        return sum(len(series.seconds) for series in (self.plain, self.cached, self.half))

    def interleaved(self) -> None:
        for done in range(self.plan.steps):
            if not self._step(done, kinds=3):
                break
            self._again(self.last, done)
            if not self.plan.has_time_for(0):
                break
        self._loader_alone()

    def one_after_the_other(self) -> None:
        for done in range(self.plan.steps):
            if not self._step(done, kinds=2):
                break
        self._loader_alone()
        for done in range(len(self.plain.seconds)):
            self._again(self.data.kept[done % len(self.data.kept)], done)

    def _step(self, done: int, kinds: int) -> bool:
        """Times a plain step on the data's next batch; False without time for `kinds` or data."""
        if done >= FEWEST and not self.plan.has_time_for(kinds * self.longest):
            return False
        try:
            self.plain.time(_noted(self.step, f"step {done + 1}"), self._fetch)
        except StopIteration:
            self._ended(done)
            return False
        self.data.keep(self.last)
        self.counted.append(self.plan.count(self.last))
        self.plan.on_step()
        return True

    def _fetch(self) -> Any:
        self.last = self.data.next()
        return self.last

    def evidence(self, throttled: float, steal: float) -> Evidence:
        cached, half = (
            series.run(throttled, steal) if len(series.seconds) >= FEWEST else None
            for series in (self.cached, self.half)
        )
        if cached is None:
            self._too_few("input", "kept batches")
        if half is None and self._halving:
            self._too_few("elasticity", "half the batch")
        return Evidence(
            self.plain.run(throttled, steal),
            cached,
            half,
            loader=self.loader,
            tokens=mean_tokens(self.counted),
            not_checked=tuple(self.not_checked),
        )

    def _too_few(self, part: str, batch: str) -> None:
        reason = f"the budget had no time for steps of {batch}"
        if self._has_time:
            reason = f"the data ended before {FEWEST} steps of {batch}"
        if not any(reason.startswith(f"{part}:") for reason in self.not_checked):
            if self.plan.steps < FEWEST:
                reason = f"{self.plan.steps} steps are too few, it needs {FEWEST}"
            self.not_checked.append(f"{part}: {reason}")

    def _again(self, batch: Any, done: int) -> None:
        """Alternates the cached batch and its half, because each step warms the caches.

        The plain steps that a verdict needs come first. Once there is no time for both, no later
        round has these kinds: the i-th steps of all kinds share a round.
        """
        again = _noted(_again(self.step, batch), f"step {done + 1} again")
        for kind in rotated((lambda: self._half(batch), lambda: self.cached.time(again)), done):
            plain_left = max(0, FEWEST - len(self.plain.seconds))
            self._has_time &= self.plan.has_time_for((plain_left + bool(plain_left)) * self.longest)
            if self._has_time:
                kind()

    def _half(self, batch: Any) -> None:
        if not self._halving:
            return
        try:
            smaller = halve(batch)
        except (ValueError, TypeError) as error:
            self._no_half(str(error))
            return
        try:
            self.half.time(_again(self.step, smaller))
        except Exception as error:  # noqa: BLE001  the user's step may need a whole batch
            self._no_half(f"the step raises on it, {type(error).__name__}: {error}")

    def _no_half(self, reason: str) -> None:
        self._halving = False
        self.half.seconds.clear()
        self.not_checked.append(f"elasticity: no half of the batch: {reason}")

    def _ended(self, done: int) -> None:
        if done:
            self.not_checked.append(f"the data ended after {done} measured steps")
            return
        self.not_checked.append("input: the data ended in the warm-up")
        for step in range(self.plan.steps):
            batch = self.data.kept[step % len(self.data.kept)]
            self.counted.append(self.plan.count(batch))
            self.plain.time(_noted(_again(self.step, batch), f"step {step + 1}"))
            if self.plan.has_time_for(0):
                self._half(batch)
            self.plan.on_step()
            if not self.plan.has_time_for(2 * self.longest if step + 1 >= FEWEST else 0):
                break

    def _loader_alone(self) -> None:
        remaining = max(0.0, 0.25 * (self.plan.deadline - perf_counter()))
        self.loader = self.data.alone(remaining)
        self.data.close()


def _without_data(
    step: Callable[..., Any], phases: Phases, plan: StepsPlan
) -> tuple[Evidence, Allocations | None]:
    longest = 0.0
    for done in range(max(1, plan.warmup)):
        longest = _timed(_noted(step, f"warm-up step {done + 1}"), plan.driver)
        if not plan.has_time_for(longest):
            break
    series, before, held = Series(phases, driver=plan.driver), plan.driver.stats(), Withheld()
    for done in range(plan.steps):
        if done and not plan.has_time_for(longest if done >= FEWEST else 0):
            break
        series.time(_noted(step, f"step {done + 1}"))
        plan.on_step()
    evidence = Evidence(
        series.run(*held.shares()),
        tokens=plan.count(None),
        not_checked=("input: no data was given", "elasticity: no data was given"),
    )
    return evidence, allocations(before, plan.driver.stats(), len(series.seconds))


def _warm_up(step: Callable[..., Any], data: Data, plan: StepsPlan) -> float:
    """Seconds of the last warm-up step, so that a compilation in the first one does not count."""
    longest = 0.0
    for done in range(max(1, plan.warmup)):
        try:
            batch = data.next()
        except StopIteration:
            if not data.kept:
                raise ValueError("profile: data must have at least one batch, got none") from None
            break
        data.keep(batch)
        if not data.kept:
            raise ValueError(
                f"profile: a batch must have at most {KEPT_BYTES >> 20} MiB, since batches are kept"
            )
        longest = _timed(_noted(_again(step, batch), f"warm-up step {done + 1}"), plan.driver)
        if not plan.has_time_for((1 + FEWEST) * longest):  # the measured steps matter more
            break
    return longest


def _fewer_threads(
    step: Callable[[], Any], phases: Phases, plan: StepsPlan, cpus: float
) -> Run | None:
    """The step with as many threads as CPUs; None where torch has no more threads than that."""
    threads, fitting = torch.get_num_threads(), max(1, math.floor(cpus))
    if threads <= fitting:
        return None
    series = Series(phases, driver=plan.driver)
    torch.set_num_threads(fitting)
    try:
        # The first step makes the pool of threads again.
        longest = max(_timed(step, plan.driver) for _ in range(2))
        for done in range(plan.steps):
            if done >= FEWEST and not plan.has_time_for(longest):
                break
            series.time(step)
    finally:
        torch.set_num_threads(threads)
    return series.run()


def _timed(step: Callable[[], Any], driver: Driver) -> float:
    """Seconds of a step with a wait for the GPU."""

    def waited() -> None:
        step()
        driver.synchronize()

    return wall_seconds(waited)


def _again(step: Callable[..., Any], batch: Any) -> Callable[[], Any]:
    return lambda: step(batch)


def _noted(step: Callable[..., Any], where: str) -> Callable[..., Any]:
    """The step; what it raises gets a note that says in which step of the profile."""

    def run(*batch: Any) -> Any:
        try:
            return step(*batch)
        except StopIteration as error:
            raise RuntimeError("profile: the step raised StopIteration") from error
        except Exception as error:
            error.add_note(f"fusedops.profile: raised by the step itself, in {where}")
            raise

    return run
