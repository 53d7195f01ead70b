"""Measures the overhead of `fusedops.recording`: `python -m benchmarks.bottlenecks.recording`.

Single steps of the demo with `fusedops.recording` and without it alternate (ABBA), on the same
batch. They exclude the warm-up step in which a recording counts the arithmetic, once.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchmarks.figures.results import folder_here
from benchmarks.harness import report
from fusedops.demo.training import EAGER, FUSED, Settings, Trainer, batches
from fusedops.measuring.clock import preempted_seconds
from fusedops.measuring.environment import environment
from fusedops.measuring.ratios import paired_ratio
from fusedops.profiling.loaders import _listeners
from fusedops.profiling.recording import Recording

__all__ = ["Hooks", "measure", "shown"]

AT_MOST = 0.01
WARM_UP, FEWEST, WATCHED = 3, 20, 20  # steps, rounds of four, and steps whose hooks are timed


class Hooks:
    """CPU time of this thread in every function that a recording has put into torch."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.seconds, self.calls = 0.0, 0
        local = model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_post_hooks
        everywhere = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        hooks: list[tuple[Any, int]] = [(held, key) for held in local + everywhere for key in held]
        for held, key in hooks:
            held[key] = self.timed(held[key])
        self.count = len(hooks)
        self.listeners = _listeners[:]
        _listeners[:] = map(self.timed, _listeners)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self.calls += 1

        return run

    def end(self) -> None:
        """The recording finds its own listeners again; its hooks are removed by their numbers."""
        _listeners[:] = self.listeners


def measure(contender: str, budget_s: float) -> dict[str, Any]:
    trainer, (tokens,) = Trainer(contender, Settings()), batches(Settings(steps=1))
    for _ in range(WARM_UP):
        trainer.step(tokens)
    load = os.getloadavg()[0]
    without: list[float] = []
    watched: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(without) < FEWEST or time.perf_counter() < deadline:
        seconds = [_step(trainer, tokens, watch) for watch in (False, True, True, False)]
        without.append(seconds[0] + seconds[3])
        watched.append(seconds[1] + seconds[2])
    ratio = paired_ratio(without, watched)
    return {
        "title": f"recording the demo's training, {contender}",
        "contender": contender,
        "environment": environment(torch.get_num_threads(), torch.device("cpu")),
        "load": [load, os.getloadavg()[0]],
        "step_s": median(without) / 2,
        "rounds": len(without),
        "overhead": [1 / ratio.median - 1, 1 / ratio.high - 1, 1 / ratio.low - 1],
        "own_cpu_s": _own(trainer, tokens),
    }


def _step(trainer: Trainer, tokens: torch.Tensor, watch: bool) -> float:
    """A step's seconds, without the time in which other programs had the CPU."""
    record = Recording(trainer.model, trainer.optimizer, warmup=0)
    if watch:
        record.start()
    held, start = preempted_seconds(), time.perf_counter()
    trainer.step(tokens)
    seconds = time.perf_counter() - start - (preempted_seconds() - held)
    record.stop()
    return seconds


def _own(trainer: Trainer, tokens: torch.Tensor) -> float:
    """CPU seconds of a recording's own functions in a step."""
    record = Recording(trainer.model, trainer.optimizer, warmup=0)
    record.start()
    hooks, costs = Hooks(trainer.model, trainer.optimizer), []
    for _ in range(WATCHED):
        hooks.seconds = 0.0
        trainer.step(tokens)
        costs.append(hooks.seconds)
    hooks.end()
    record.stop()
    return median(costs)


def shown(row: dict[str, Any]) -> str:
    """eager +0.05 % (-0.20..+0.31), 120 us"""
    middle, low, high = (100 * value for value in row["overhead"])
    interval = f"{middle:+.2f} % ({low:+.2f}..{high:+.2f})"
    return f"{row['contender']} {interval}, {1e6 * row['own_cpu_s']:.0f} us"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.recording")
    parser.add_argument(
        "contenders", nargs="*", help=f"of {', '.join((EAGER, FUSED))}; by default all"
    )
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for each contender")
    results = folder_here() / "recording.json"
    parser.add_argument("--json", default=str(results), help="other contenders' rows there stay")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = Path(args.json)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["contender"]: row for row in kept}
    rows |= {name: measure(name, args.budget) for name in args.contenders or (EAGER, FUSED)}
    what = "overhead, upper end of the 95 % interval"
    goals = [
        report.goal(row["title"], what, AT_MOST, row["overhead"][2], at_most=True)
        for row in rows.values()
    ]
    report.save(args, list(rows.values()), goals)
    print("\n".join(map(shown, rows.values())))
    return int(not all(goal["met"] for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
