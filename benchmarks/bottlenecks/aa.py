"""Tests A/B timing with equal steps and a slower one: `python -m benchmarks.bottlenecks.aa`.

A step is compared with itself: the ratio's interval must contain 1. Then it is compared with a
step that is 10 % slower: the interval must show it. Prints how often that holds, and how wide the
intervals are.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch

from fusedops.measuring.blocks import compare_blocks, ratio_of
from fusedops.measuring.quantiles import quantiles
from fusedops.measuring.ratios import Ratio

SLOWER = 0.10


class Step:
    """Matrix products; if slowed, a loop follows that takes a share of their time."""

    def __init__(self, size: int = 512) -> None:
        self.left, self.right = (torch.randn(size, size) for _ in range(2))
        self.slower = 0.0
        self.length = min(self._products() for _ in range(20))

    def __call__(self) -> None:
        self._products()
        end = time.thread_time() + self.slower * self.length
        while time.thread_time() < end:
            pass

    def _products(self) -> float:
        start = time.thread_time()
        for _ in range(4):
            self.left @ self.right
        return time.thread_time() - start

    @contextmanager
    def slowed(self) -> Iterator[None]:
        self.slower = SLOWER
        yield
        self.slower = 0.0


def ratios(step: Step, change: Callable, runs: int, budget_s: float) -> list[Ratio]:
    return [ratio_of(*compare_blocks(step, change, budget_s)) for _ in range(runs)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.aa")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of one experiment")
    parser.add_argument("--json", help="write the intervals there")
    args = parser.parse_args()
    step = Step()
    equal = ratios(step, nullcontext, args.runs, args.budget)
    slower = ratios(step, step.slowed, args.runs, args.budget)
    contain = sum(ratio.low <= 1 <= ratio.high for ratio in equal)
    caught = sum(ratio.high < 1 for ratio in slower)
    width = median(ratio.high - ratio.low for ratio in equal)
    low, high = quantiles([ratio.median for ratio in slower], 0.0, 1.0)
    print(f"equal steps: the interval contains 1 in {contain} of {args.runs}; width {width:.1%}")
    print(f"10 % slower: found in {caught} of {args.runs}; ratios {low:.3f}..{high:.3f} for 0.909")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"equal": equal, "slower": slower, "width": width}, file)
    enough = contain >= 0.95 * args.runs and caught >= 0.9 * args.runs and width <= 0.06
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
