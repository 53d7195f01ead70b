"""`fusedops.recording`: times the steps of a training loop without changing the loop.

It runs no experiment and reads a few counters a step. A step runs from the end of one optimizer
step to the end of the next, so gradient accumulation counts as one.
"""

import logging
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusedops.machine import usable_cpus
from fusedops.measuring.arguments import a_model, an_optimizer, check_types
from fusedops.measuring.clock import preempted_seconds, throttled_seconds, withheld
from fusedops.profiling.collect.batches import count_tokens, mean_tokens
from fusedops.profiling.collect.experiments import about
from fusedops.profiling.collect.series import Phases, Series
from fusedops.profiling.counting import StepArithmetic
from fusedops.profiling.evidence import Evidence, Loader, Tokens
from fusedops.profiling.loaders import watched_loaders
from fusedops.profiling.report import Profile

__all__ = ["Recording", "peak_bytes", "recording"]

log = logging.getLogger(__name__)

PASSIVE = (
    "contention with the loader: needs the experiments of fusedops.profile",
    "elasticity: needs the experiments of fusedops.profile",
    "operators: needs the experiments of fusedops.profile",
    "memory: needs the experiments of fusedops.profile",
)


@contextmanager
def recording(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tokens: int | None = None,
    warmup: int = 3,
) -> Iterator["Recording"]:
    """Records the steps of the loop inside of the `with` block, at less than 1 % of their time.

    model: gives the forward's time, tokens and arithmetic. optimizer: the one whose steps end a
    step; by default any. tokens: of a step, if they cannot be counted in the model's inputs.
    warmup: steps that do not count; the arithmetic of forward and backward is counted in the last
    of them.

    The time that the loop waits for a DataLoader is the input's share; other iterables are not
    seen. `report()` gives the Profile, also after the block. Raises TypeError for a model or an
    optimizer of another type.
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
    and does not reach the loop. Hooks of optimizers stay until `stop`, and do nothing.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tokens: int | None = None,
        warmup: int = 3,
        limit: int | None = None,
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
        self.counted: list[Tokens] = []
        self.flops: dict[str, int] | None = None
        self._to_warm_up = warmup
        self._is_over = False
        self._wait = self._wait_cpu = 0.0
        self._workers: int | None = None
        self._batch: list[Tokens] = []
        self._kept, self._of_loop = ExitStack(), ExitStack()
        self._counting: StepArithmetic | None = None
        self._reading: tuple[Counters, float, float] | None = None
        self._from = perf_counter(), throttled_seconds(), withheld()

    @property
    def steps(self) -> int:
        """How many steps were recorded, warm-up left out."""
        return len(self.series.seconds)

    def start(self) -> None:
        end = self._end_of_step
        if self.optimizer is not None:
            handle = self.optimizer.register_step_post_hook(end)
        else:
            handle = register_optimizer_step_post_hook(end)
        self._kept.callback(handle.remove)
        self._kept.enter_context(self.phases)
        self._of_loop.enter_context(watched_loaders(self.waited))
        self._of_loop.callback(self.phases.leave_model)
        if self.model is not None:
            hook = self.model.register_forward_pre_hook(self._inputs, with_kwargs=True)
            self._of_loop.callback(hook.remove)
        self._arm()

    def stop(self) -> None:
        self._end_counting()
        self._of_loop.close()
        self._kept.close()

    def report(self) -> Profile:
        """Raises RuntimeError if no step was recorded yet."""
        if not self.series.seconds:
            raise RuntimeError(
                "recording: needs a step after the warm-up, and the optimizer made none"
            )
        from fusedops.profiling.collect.ceilings import ceilings

        start, throttled, ticks = self._from
        wall = perf_counter() - start
        now = withheld()
        steal = (now[0] - ticks[0]) / max(1, now[1] - ticks[1])
        run = self.series.run((throttled_seconds() - throttled) / wall, steal)
        loader = None if self._workers is None else Loader(self._workers, self._workers > 0)
        return Profile(
            Evidence(
                plain=run,
                loader=loader,
                tokens=mean_tokens(self.counted),
                ceilings=ceilings(self.flops) if self.flops else None,
                flops=self.flops,
                device="cuda" if torch.cuda.is_initialized() else "cpu",
                threads=torch.get_num_threads(),
                cpus=usable_cpus(),
                about=about(self.model),
                not_checked=tuple(self._not_checked()),
            )
        )

    def _not_checked(self) -> Iterator[str]:
        if self._workers is None:
            yield "input: no torch DataLoader was read"
        if self.flops is None:
            reason = "the model is compiled" if _compiled(self.model) else "no model or no warm-up"
            yield f"arithmetic: {reason}"
        yield from PASSIVE

    def _arm(self, counters: "Counters | None" = None) -> None:
        """Prepares the step that comes: the last of the warm-up is counted, later ones timed."""
        if self._to_warm_up == 1 and self.model is not None and not _compiled(self.model):
            self._counting = StepArithmetic(self.model)
        if self._to_warm_up <= 0:
            self._begin(counters or _counters())

    def _begin(self, counters: "Counters") -> None:
        self._wait = self._wait_cpu = 0.0
        self._batch.clear()
        self.phases.reset()
        self._reading = counters, thread_time(), perf_counter()

    def _end_of_step(self, *_: object) -> None:
        if self._is_over:
            return
        counters = None  # read once: they end a step and begin the next one
        if self._reading is not None:
            counters = self._add(*self._reading)
        if self._counting is not None:
            self.flops = self._counting.flops
        self._end_counting()
        self._to_warm_up -= 1
        self._arm(counters)
        if self.limit is not None and self.steps >= self.limit:
            self._is_over, self._reading = True, None  # a hook cannot remove itself
            self._of_loop.close()
            try:
                self.done()
            except Exception:
                log.warning("recording: the report raised", exc_info=True)

    def _end_counting(self) -> None:
        if self._counting is not None:
            self._counting.close()
        self._counting = None

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
        self.counted.append(_sum(self._batch, self.tokens))
        return end

    def _inputs(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._reading is not None and torch.is_grad_enabled():
            self._batch.append(count_tokens(kwargs or args, None))

    def waited(self, seconds: float, cpu: float, workers: int) -> None:
        """Adds a wait for a DataLoader: its seconds, and the CPU seconds of the waiting thread."""
        self._wait += seconds
        self._wait_cpu += cpu
        self._workers = workers


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


def _compiled(model: nn.Module | None) -> bool:
    modules = model.modules() if model is not None else ()
    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None)
        for m in modules
    )


def _sum(batches: list[Tokens], tokens: int | None) -> Tokens:
    """Of a step, whose forward may have run several times."""

    def total(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        return None if not values or None in values else sum(values)

    if tokens is not None:
        return Tokens(float(tokens), float(tokens), total("samples"))
    return Tokens(total("real"), total("padded"), total("samples"))
