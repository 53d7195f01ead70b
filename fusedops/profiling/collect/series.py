"""Times steps and their phases without a profiler."""

import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter, thread_time
from typing import Any

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusedops.measuring.clock import preempted_seconds, throttled_seconds, withheld
from fusedops.measuring.driver import Driver, between
from fusedops.profiling.collect.forwards import around
from fusedops.profiling.evidence import Run

__all__ = ["Phases", "Series", "Withheld"]


class Phases:
    """Seconds in the models' forwards and in the steps of optimizers, while it is entered.

    It uses hooks of the models themselves and of every optimizer, so it needs no code in the step.
    A closure that an optimizer's step runs is not part of that step's time. driver: of the GPU
    whose events measure, once CUDA is used; None measures on the host. first_forward: when the
    first forward since `reset` began, by `perf_counter` and `thread_time`.
    """

    def __init__(self, model: nn.Module | None, driver: Driver | None = None) -> None:
        self.model, self.driver = model, driver
        self.first_forward: tuple[float, float] | None = None
        self._forward_began: Any = 0.0
        self._step_began: Any = None
        self._forward: list[tuple[Any, Any]] = []
        self._optimizer: list[tuple[Any, Any]] = []
        self._closures: list[tuple[Any, Any]] = []
        self._kept, self._of_models = ExitStack(), ExitStack()

    def __enter__(self) -> "Phases":
        handles = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self.end_step),
        ]
        for handle in handles:
            self._kept.callback(handle.remove)
        if self.model is not None:
            self.follow(self.model)
        return self

    def __exit__(self, *error: object) -> None:
        self.leave_models()
        self._kept.close()

    def follow(self, model: nn.Module) -> None:
        """Times the forwards of one more model."""
        self._of_models.callback(around(model, self._begin_forward, self._end_forward))

    def leave_models(self) -> None:
        """Removes the models' hooks; a hook of an optimizer may call it."""
        self._of_models.close()

    def reset(self) -> None:
        self.first_forward = None
        for times in (self._forward, self._optimizer, self._closures):
            times.clear()

    @property
    def forward(self) -> float:
        """Seconds since `reset`. With a driver, the GPU must have finished."""
        return sum(_seconds(*pair) for pair in self._forward)

    @property
    def optimizer(self) -> float:
        """Seconds since `reset`. With a driver, the GPU must have finished."""
        inside = sum(_seconds(*pair) for pair in self._closures)
        return max(0.0, sum(_seconds(*pair) for pair in self._optimizer) - inside)

    def _begin_forward(self, *_: object) -> None:
        if self.first_forward is None:
            self.first_forward = perf_counter(), thread_time()
        self._forward_began = self._mark()

    def _end_forward(self, *_: object) -> None:
        self._forward.append((self._forward_began, self._mark()))

    def _begin_step(self, optimizer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._step_began = self._mark()
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._timed(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._timed(args[1]), *args[2:]), kwargs
        return None

    def end_step(self, *_: object) -> None:
        """Ends an optimizer's step. Hooks that read its time call this, as they may run earlier."""
        if self._step_began is not None:
            self._optimizer.append((self._step_began, self._mark()))
            self._step_began = None

    def _timed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(closure)
        def timed() -> Any:
            began = self._mark()
            try:
                return closure()
            finally:
                self._closures.append((began, self._mark()))

        return timed

    def _mark(self) -> Any:
        if self.driver is not None and self.driver.active:
            return self.driver.event()
        return perf_counter()


def _seconds(first: Any, last: Any) -> float:
    """Between two marks. None of the time counts if CUDA was started between them."""
    if isinstance(first, float):
        return last - first if isinstance(last, float) else 0.0
    return between(first, last)


class Withheld:
    """How much CPU time the cgroup and the hypervisor withhold from now on."""

    def __init__(self) -> None:
        self._start, self._throttled, self._ticks = perf_counter(), throttled_seconds(), withheld()

    def shares(self) -> tuple[float, float]:
        """Throttling's share of the wall time; the share of the CPUs' time that was withheld."""
        throttled = throttled_seconds() - self._throttled
        (stolen, ticks), (stolen_before, ticks_before) = withheld(), self._ticks
        return (
            throttled / (perf_counter() - self._start),
            (stolen - stolen_before) / max(1, ticks - ticks_before),
        )


@dataclass
class Series:
    """Steps of one kind; `run()` is what was measured so far.

    driver: of the GPU that may be used. Each step ends with a wait for it, and no step has another
    one that is not its own.
    """

    phases: Phases
    paired: bool = False
    driver: Driver = field(default_factory=Driver)
    seconds: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    on_gpu: list[float] = field(default_factory=list)
    synced: list[float] = field(default_factory=list)
    used: list[resource.struct_rusage] = field(default_factory=list)  # before and after each step

    def time(self, step: Callable[..., Any], fetch: Callable[[], Any] | None = None) -> None:
        """One step with what `fetch` gives, or without an argument.

        Raises StopIteration, and records nothing, if `fetch` has nothing more.
        """
        self.phases.reset()
        delayed = preempted_seconds()
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = perf_counter()
        batch = (fetch(),) if fetch else ()
        waited = perf_counter() - start if fetch else 0.0
        running = thread_time()
        first = self.driver.event()
        step(*batch)
        last, issued = self.driver.event(), perf_counter()
        self.driver.synchronize()
        self.cpu.append(thread_time() - running)
        end = perf_counter()
        self.seconds.append(end - start)
        if first is not None:
            self.on_gpu.append(between(first, last))
            self.synced.append(end - issued)
        self.used += [before, resource.getrusage(resource.RUSAGE_SELF)]
        self.preempted.append(preempted_seconds() - delayed)
        self.wait.append(waited)
        self.forward.append(self.phases.forward)
        self.optimizer.append(self.phases.optimizer)

    def run(self, throttled: float = 0.0, steal: float = 0.0) -> Run:
        """throttled: share of the wall time. steal: share of the machine's CPU time."""
        return Run(
            seconds=tuple(self.seconds),
            wait=tuple(self.wait),
            forward=tuple(self.forward),
            optimizer=tuple(self.optimizer),
            cpu=tuple(self.cpu),
            preempted=tuple(self.preempted),
            user=self._sum("ru_utime"),
            system=self._sum("ru_stime"),
            faults=round(self._sum("ru_minflt")),
            voluntary=round(self._sum("ru_nvcsw")),
            involuntary=round(self._sum("ru_nivcsw")),
            throttled=throttled * sum(self.seconds),
            steal=steal,
            paired=self.paired,
            on_gpu=tuple(self.on_gpu),
            synced=tuple(self.synced),
        )

    def _sum(self, counter: str) -> float:
        pairs = zip(self.used[::2], self.used[1::2], strict=True)
        return sum(getattr(after, counter) - getattr(before, counter) for before, after in pairs)
