"""Checks the timed calls' choices on random other calls: `python -m checks calibration`.

A choice is wrong if it loses more than 5 % against the other code. Exits with 1 if over 2 % are.
"""

import argparse
import math
import time
from collections import Counter
from importlib import import_module
from random import Random

import torch

from fusedops import _C
from fusedops.backends import linear_of_any_size
from fusedops.calibration import choice
from fusedops.calibration.contest import Case, measured_ratio
from fusedops.calibration.run import CALIBRATED
from fusedops.measuring.alternate import Rounds
from fusedops.testing import threads

LOST, MOST = 1.05, 0.02
CLOSE = 1.35  # calls with such a ratio are timed again
ROUNDS, REPEATED = Rounds(5, 21, 0.03), Rounds(15, 61, 0.2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=[*CALIBRATED], default="attention")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1, help="calibrate's own is 0")


def run(args: argparse.Namespace) -> int:
    draw = import_module(f"fusedops.calibration.{args.family}").draw
    random, end = Random(args.seed), time.perf_counter() + args.seconds
    results: list[tuple[Case, float, bool]] = []
    earlier = linear_of_any_size(True)
    with threads(args.threads):
        while time.perf_counter() < end:
            results.append(_result(draw(random)))
    linear_of_any_size(earlier)
    wrong = [r for r in results if _loss(*r[1:]) > LOST]
    for case, ratio, taken in sorted(wrong, key=lambda r: -_loss(*r[1:])):
        print(f"{case.kind} {case.sizes}: {'ours' if taken else 'torch'}, ratio {ratio:.2f}")
    slower = sum(taken for *_, taken in wrong)
    chosen = sum(taken for *_, taken in results)
    lost = math.exp(sum(math.log(_loss(*r[1:])) for r in results) / len(results))
    print(
        f"{args.family}, threads: {args.threads}: {len(results)} calls, ours chosen for {chosen}; "
        f"wrong {len(wrong) / len(results):.1%}, of {slower} calls ours was chosen and slower; "
        f"{lost - 1:.2%} lost against the best choices"
    )
    print(Counter(case.kind for case, *_ in wrong).most_common(8))
    return int(len(wrong) > MOST * len(results))


def _result(case: Case) -> tuple[Case, float, bool]:
    """The call, our seconds over torch's, and whether ours is chosen. Repeats what is close."""
    contest = case.make()
    kind = choice.with_threads(case.kind, torch.get_num_threads())
    taken = _C.timed_call_pays(kind, case.sizes)
    ratio = measured_ratio(contest, ROUNDS)
    if 1 / CLOSE < ratio < CLOSE:
        ratio = measured_ratio(contest, REPEATED)
    return case, ratio, taken


def _loss(ratio: float, taken: bool) -> float:
    """The seconds of the chosen code over those of the better one."""
    return max(1.0, ratio if taken else 1 / ratio)
