"""Measures a model's blocks for activation checkpointing: saved bytes, forward time and peak."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.measuring.clock import preempted_seconds
from fusedops.measuring.driver import Driver
from fusedops.patching.core.swap import original_class
from fusedops.profiling.collect.block_memory import BlockUse, measure_blocks
from fusedops.profiling.collect.measurements import Measurements
from fusedops.profiling.collect.steps import MeasuredSteps
from fusedops.profiling.evidence import Block
from fusedops.profiling.planning.step import blocks

__all__ = ["add_blocks", "cost_of_blocks", "may_checkpoint"]

LARGE = 0.4  # share of the peak from which saved activations are worth a recomputation
TIMED = 4  # steps
STEPS = TIMED + 4  # what all takes: a watched step is slower

Nothing = Callable[[], None]


def add_blocks(
    measurements: Measurements,
    measured: MeasuredSteps,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    deadline: float,
    driver: Driver | None,
) -> None:
    """Adds the blocks that are worth checkpointing, if activations are large.

    deadline: a `perf_counter` time. driver: the GPU that the step uses.
    """
    if not may_checkpoint(measurements.memory):
        return
    longest = median((measured.cached or measured.plain).seconds)
    if perf_counter() + STEPS * longest + 1 > deadline:
        measurements.not_checked.append("checkpointing: the budget had no time for it")
        return
    try:
        measurements.blocks = cost_of_blocks(measured.call, model, optimizer, driver)
    except Exception as error:  # noqa: BLE001  the user's step, under hooks and a profiler
        reason = f"a watched step raised {type(error).__name__}: {error}"
        measurements.not_checked.append(f"checkpointing: {reason}")


def may_checkpoint(memory: Mapping[str, int] | None) -> bool:
    """Whether what is saved for backward is a large part of a step's peak."""
    return memory is not None and memory.get("activations", 0) >= LARGE * memory["peak"]


def cost_of_blocks(
    call: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    driver: Driver | None = None,
) -> tuple[Block, ...]:
    """The blocks in the order in which to checkpoint them: most bytes per added second first.

    Runs a few steps. driver: the GPU that they use. Blocks of one class that save as much count
    as equal, and of these the earlier ones come first, since the last one is needed right after the
    peak.
    """
    device = torch.device("cpu") if driver is None else driver.device
    synchronize = (lambda: None) if driver is None else driver.synchronize
    candidates = {p: b for p, b in blocks(model).items() if next(b.children(), None) is not None}
    if not candidates:
        return ()
    use = measure_blocks(call, model, optimizer, candidates, device)
    candidates = {path: block for path, block in candidates.items() if use.saved(path)}
    seconds = _alike(candidates, use, _seconds(call, candidates, synchronize))
    order = sorted(candidates, key=lambda path: -use.saved(path) / max(seconds[path], 1e-9))
    _, *peaks = use.peaks(order)
    return tuple(
        Block(path, use.saved(path), seconds[path], peak)
        for path, peak in zip(order, peaks, strict=True)
    )


def _seconds(
    call: Callable[[], Any], candidates: Mapping[str, nn.Module], synchronize: Nothing
) -> dict[str, float]:
    """Seconds of each block's forwards in a step, without other programs' time."""
    steps: dict[str, list[float]] = defaultdict(list)
    for _ in range(TIMED):
        sums: dict[str, float] = dict.fromkeys(candidates, 0.0)
        with _timed(candidates, sums, synchronize):
            call()
        for path, seconds in sums.items():
            steps[path].append(seconds)
    return {path: median(values) for path, values in steps.items()}


@contextmanager
def _timed(
    candidates: Mapping[str, nn.Module], sums: dict[str, float], synchronize: Nothing
) -> Iterator[None]:
    began: list[tuple[float, float]] = []

    def enter(*_: object) -> None:
        synchronize()
        began.append((preempted_seconds(), perf_counter()))

    with ExitStack() as hooks:
        for path, block in candidates.items():

            def leave(*_: object, path: str = path) -> None:
                synchronize()
                delayed, start = began.pop()
                seconds = perf_counter() - start
                running = seconds - (preempted_seconds() - delayed)
                sums[path] += max(0.02 * seconds, running)

            hooks.callback(block.register_forward_pre_hook(enter).remove)
            hooks.callback(block.register_forward_hook(leave).remove)
        yield


def _alike(
    candidates: Mapping[str, nn.Module], use: BlockUse, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The seconds; equal blocks have their median."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for path, block in candidates.items():
        groups[original_class(block), use.saved(path)].append(path)
    return {
        path: median(seconds[equal] for equal in alike)
        for alike in groups.values()
        for path in alike
    }
