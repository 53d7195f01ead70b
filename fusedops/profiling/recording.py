"""`fusedops.recording`: times the steps of a training loop without changing the loop.

It runs no experiment and reads a few counters a step. A step runs from the end of one optimizer
step to the end of the next, so gradient accumulation counts as one.
"""

import itertools
import logging
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedops.measuring.arguments import a_model, an_optimizer, check_types
from fusedops.measuring.clock import preempted_seconds
from fusedops.measuring.snapshot import Snapshot
from fusedops.profiling.collect.batches import count_tokens, mean_tokens, nbytes
from fusedops.profiling.collect.forwards import around
from fusedops.profiling.collect.recorded import evidence_of, with_experiments
from fusedops.profiling.collect.recorded_step import RecordedStep
from fusedops.profiling.collect.replayed import Batch, replayed_step
from fusedops.profiling.collect.series import Phases, Series, Withheld
from fusedops.profiling.collect.training import Training, largest
from fusedops.profiling.evidence import Loader, Tokens
from fusedops.profiling.loaders import watched_loaders
from fusedops.profiling.report import Profile
from fusedops.profiling.run import profile

__all__ = ["Recording", "peak_bytes", "recording"]

log = logging.getLogger(__name__)

KEPT_STEPS = 8  # whose batches stay for experiments


@contextmanager
def recording(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tokens: int | None = None,
    warmup: int = 3,
) -> Iterator["Recording"]:
    """Records the steps of the loop inside of the `with` block, at less than 1 % of their time.

    model: gives the forward's time, tokens and operators; by default the outermost module that
    runs and has parameters of the optimizer. optimizer: the one whose steps end a step; by default
    the first one that steps. tokens: of a step, if they cannot be counted in the model's inputs.
    warmup: steps that do not count; the operators of forward and backward are recorded in the last
    of them.

    The time that the loop waits for a DataLoader is the input's share; of other iterables, what the
    loop does before its forward. `report()` gives the Profile, also after the block. Raises
    TypeError for a model or an optimizer of another type.
    """
    record = Recording(model, optimizer, tokens=tokens, warmup=warmup)
    record.start()
    try:
        yield record
    finally:
        record.stop()


class Recording:
    """The steps that a loop has run since `start`. Its hooks are removed by `stop`.

    limit: after so many steps it records no more, and calls `done`. An error of `done` is logged
    and does not reach the loop. Hooks of optimizers stay until `stop`, and do nothing. keep: keeps
    the inputs of the last steps, for `experiments`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tokens: int | None = None,
        warmup: int = 3,
        limit: int | None = None,
        keep: bool = False,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        check_types(
            "recording",
            model=a_model(model, optional=True),
            optimizer=an_optimizer(optimizer, optional=True),
        )
        self.model, self.optimizer, self.tokens = model, optimizer, tokens
        self.limit, self.done = limit, done
        self.phases = Phases(model)
        self.series = Series(self.phases)
        self.training = Training()
        self.counted: list[Tokens] = []
        self.batches: deque[list[Batch]] | None = deque(maxlen=KEPT_STEPS) if keep else None
        self._to_warm_up = warmup
        self._is_over = False
        self._wait = self._wait_cpu = 0.0
        self._before_forward: list[tuple[float, float]] = []  # seconds, and CPU seconds of them
        self._began_in_backward = False  # the hook of a gradient stepped the optimizer
        self._workers: int | None = None
        self._fetched = 0
        self._tokens: list[Tokens] = []
        self._batch: list[Batch] = []
        self._kept, self._of_loop = ExitStack(), ExitStack()
        self._recorded_step: RecordedStep | None = None
        self._ends_steps = optimizer
        self._seen: Callable[[], None] = lambda: None  # removes the hook that sees the inputs
        self._reading: tuple[Counters, float, float] | None = None
        self._withheld = Withheld()

    @property
    def steps(self) -> int:
        """How many steps were recorded, warm-up left out."""
        return len(self.series.seconds)

    def start(self) -> None:
        handles = []
        if self._to_warm_up > 0 and (self.model is None or self.optimizer is None):
            self._of_loop.enter_context(self.training)
            handles.append(register_optimizer_step_post_hook(self.training.stepped))
        if self.optimizer is not None:
            handles.append(self.optimizer.register_step_post_hook(self._end_of_step))
        else:
            handles.append(register_optimizer_step_post_hook(self._optimizer_stepped))
        for handle in handles:
            self._kept.callback(handle.remove)
        self._kept.enter_context(self.phases)
        self._of_loop.enter_context(watched_loaders(self.waited))
        self._of_loop.callback(self.phases.leave_models)
        self._of_loop.callback(lambda: self._seen())
        if self.model is not None:
            self._follow_models([self.model])
        self._arm()

    def stop(self) -> None:
        self._end_recorded_step()
        self._of_loop.close()
        self._kept.close()

    def report(self) -> Profile:
        """Raises RuntimeError if no step was recorded yet."""
        if not self.series.seconds:
            raise RuntimeError(
                "recording: needs a step after the warm-up, and the optimizer made none"
            )
        evidence = evidence_of(
            self.series.run(*self._withheld.shares()),
            self.model,
            [self.optimizer] if self.optimizer is not None else self.training.optimizers,
            mean_tokens(self.counted),
            self._recorded_step,
            self._loader(),
            self._before_forward,
            self.batches[-1] if self.batches else (),
        )
        return Profile(evidence)

    def before_next_forward(self, call: Callable[[], None]) -> None:
        """Calls it once, before the model's next forward.

        A hook of an optimizer, such as `done`, must not run steps of optimizers itself.
        """
        if self.model is None:
            return

        def hook(*_: object) -> None:
            remove()
            call()

        remove = around(self.model, hook)
        self._kept.callback(remove)

    def experiments(self, budget_s: float) -> Profile:
        """The report with what experiments show on the kept batches; they put everything back.

        Raises RuntimeError without a model, an optimizer or a kept batch.
        """
        batches = [batch for batch in self.batches or () if batch]
        optimizer = self.optimizer or largest(self.training.optimizers)
        if self.model is None or optimizer is None or not batches:
            raise RuntimeError("recording: experiments need a model, an optimizer and a batch")
        step = replayed_step(self.model, optimizer)
        with ExitStack() as kept:
            for other in self.training.optimizers:  # hooks of gradients may step them
                if other is not optimizer:
                    kept.enter_context(Snapshot(None, other))
            kept.enter_context(torch.enable_grad())
            kept.enter_context(torch.autocast(self._device, enabled=False))
            tried = profile(
                step,
                data=itertools.cycle(batches),
                model=self.model,
                optimizer=optimizer,
                steps=KEPT_STEPS,
                budget_s=budget_s,
                measure=True,
            )
        report = Profile(with_experiments(self.report().evidence, tried.evidence))
        report.take_measured(tried)
        return report

    def _loader(self) -> Loader | None:
        if self._workers is None:
            return None
        waits = sum(self.series.wait)
        rate = self._fetched / waits if waits and not self._workers else None
        batches = self._fetched / len(self.series.wait)
        return Loader(self._workers, self._workers > 0, rate, batches=batches)

    def _follow_models(self, models: list[nn.Module]) -> None:
        """Times their forwards and sees the first one's inputs; the loop may have compiled it."""
        self.phases.leave_models()
        self._seen()
        for model in models:
            self.phases.follow(model)
        self._seen = around(models[0], self._forward_begins)

    def _arm(self, counters: "Counters | None" = None) -> None:
        """Prepares the step that comes: the last of the warm-up is recorded, later ones timed."""
        if self._to_warm_up == 1:
            self._recorded_step = RecordedStep()
        if self._to_warm_up <= 0:
            self._begin(counters or _counters())

    def _begin(self, counters: "Counters") -> None:
        self._wait = self._wait_cpu = 0.0
        self._tokens.clear()
        self._batch = []
        self._began_in_backward = torch._C._current_graph_task_id() != -1
        self.phases.reset()
        self._reading = counters, thread_time(), perf_counter()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._ends_steps is None:
            self._ends_steps = optimizer
        if self._ends_steps is optimizer:
            self._end_of_step()

    def _end_of_step(self, *_: object) -> None:
        if self._is_over:
            return
        self.phases.end_step()
        counters = None  # read once: they end a step and begin the next one
        if self._reading is not None:
            counters = self._add(*self._reading)
        if self._to_warm_up == 1:
            self._end_recorded_step()
            self._follow()
        self._to_warm_up -= 1
        self._arm(counters)
        if self.limit is not None and self.steps >= self.limit:
            self._is_over, self._reading = True, None  # a hook cannot remove itself
            self._of_loop.close()
            try:
                self.done()
            except Exception:
                log.warning("recording: the report raised", exc_info=True)

    def _end_recorded_step(self) -> None:
        if self._recorded_step is not None:
            self._recorded_step.close()

    def _follow(self) -> None:
        """Ends the search, and times the forwards of what was found."""
        self.training.close()
        models = [self.model] if self.model is not None else self.training.models
        if models:
            self.model = models[0]
            self._follow_models(models)
        if self._recorded_step is not None:
            if self.model is not None:
                self._recorded_step.trained(self.model)
            self._of_loop.enter_context(self._recorded_step.later_evaluations())
            if self._recorded_step.compiled and self.batches is None:
                self.batches = deque(maxlen=1)

    def _add(self, begin: "Counters", cpu: float, start: float) -> "Counters":
        series = self.series
        series.seconds.append(perf_counter() - start)
        # What the thread computes while it waits for a batch is the loader's, not the step's.
        series.cpu.append(max(0.0, thread_time() - cpu - self._wait_cpu))
        end = _counters()
        series.wait.append(self._wait)
        series.forward.append(self.phases.forward)
        series.optimizer.append(self.phases.optimizer)
        series.preempted.append(end[0] - begin[0])
        series.used += [begin[1], end[1]]
        forward, forward_cpu = self.phases.first_forward or (start, cpu)
        if self._began_in_backward:  # what is left of it is no wait for data
            forward, forward_cpu = start, cpu
        self._before_forward.append((forward - start, forward_cpu - cpu))
        if self._recorded_step is not None:
            self._recorded_step.later_step_ends()
        self.counted.append(_sum(self._tokens, self.tokens))
        if self.batches is not None:
            self.batches.append(self._batch)
        return end

    @cached_property
    def _device(self) -> str:
        parameters = self.model.parameters() if self.model is not None else ()
        return next((p.device.type for p in parameters), "cpu")

    def _forward_begins(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._reading is not None and torch.is_grad_enabled():
            inputs = [*args, kwargs] if nbytes(kwargs) else args
            self._tokens.append(count_tokens(inputs, None))
            if self.batches is not None:
                self._batch.append(Batch.of(args, kwargs, self._device))

    def waited(self, seconds: float, cpu: float, workers: int, gave: bool) -> None:
        """Adds a wait for a DataLoader: its seconds, and the CPU seconds of the waiting thread.

        gave: whether it gave a batch.
        """
        self._wait += seconds
        self._wait_cpu += cpu
        self._workers = workers
        if self._reading is not None:
            self._fetched += gave


Counters = tuple[float, resource.struct_rusage]  # seconds of preemption, what the process used


def _counters() -> Counters:
    return preempted_seconds(), resource.getrusage(resource.RUSAGE_SELF)


def peak_bytes() -> int:
    """The highest memory so far: of the GPU's tensors where one is used, else of the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _sum(batches: list[Tokens], tokens: int | None) -> Tokens:
    """Of a step, whose forward may have run several times."""

    def total(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        return None if not values or None in values else sum(values)

    if tokens is not None:
        return Tokens(float(tokens), float(tokens), total("samples"))
    return Tokens(total("real"), total("padded"), total("samples"))
