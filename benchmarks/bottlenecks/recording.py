"""`python -m benchmarks.bottlenecks.recording`: what watching the demo's training costs.

Blocks of the demo's steps with `fusedops.recording` and without it alternate (ABBA). The first step
of a block is not timed: it is the one in which a recording counts the arithmetic, once.
"""

import argparse
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from time import thread_time

import torch

from benchmarks.harness import report
from fusedops.demo.training import CONTENDERS, Settings, Trainer, batches
from fusedops.profiling.advice.experiment import compare_blocks, ratio_of
from fusedops.profiling.recording import recording
from fusedops.profiling.timing import Ratio

__all__ = ["overhead"]

RESULTS = Path(__file__).parents[1] / "results" / "amd-epyc" / "recording.json"
AT_MOST = 0.01
WARM_UP = 3


def overhead(ratio: Ratio) -> tuple[float, float, float]:
    """The part of a step that a recording adds, with its interval, from unwatched over watched."""
    return 1 / ratio.median - 1, 1 / ratio.high - 1, 1 / ratio.low - 1


def measure(contender: str, budget_s: float) -> dict:
    trainer, (tokens, *_) = Trainer(contender, Settings()), batches(Settings(steps=1))
    call = partial(trainer.step, tokens)
    for _ in range(WARM_UP):
        call()

    def watched() -> AbstractContextManager[object]:
        return recording(trainer.model, trainer.optimizer, warmup=1)

    without, recorded = compare_blocks(call, watched, budget_s)
    middle, low, high = overhead(ratio_of(without, recorded))
    return {
        "title": f"recording the demo's training, {contender}",
        "contender": contender,
        "step_s": median(without),
        "blocks": len(without),
        "overhead": [middle, low, high],
        "counted_step_s": _counted(call, watched),
    }


def _counted(call: partial, watched: partial) -> float:
    """CPU seconds that the step in which the arithmetic is counted takes more than others."""
    costs = []
    for _ in range(3):
        plain = _cpu_time(call)
        with watched():
            costs.append(_cpu_time(call) - plain)
    return median(costs)


def _cpu_time(call: partial) -> float:
    start = thread_time()
    call()
    return thread_time() - start


def shown(row: dict) -> str:
    middle, low, high = (100 * value for value in row["overhead"])
    return f"{row['contender']}: {middle:+.2f} % ({low:+.2f}..{high:+.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.recording")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each contender")
    parser.add_argument("--json", default=str(RESULTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(contender, args.budget) for contender in CONTENDERS]
    goals = [
        {"title": row["title"], "what": "overhead, upper end of the 95 % interval"}
        | {"asked": AT_MOST, "measured": row["overhead"][2], "met": row["overhead"][2] < AT_MOST}
        for row in rows
    ]
    report.save(args, rows, goals)
    print("\n".join(map(shown, rows)))
    return int(not all(goal["met"] for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
