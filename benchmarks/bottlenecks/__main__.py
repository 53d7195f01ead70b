"""Profiles steps with known bottlenecks and prints verdicts: `python -m benchmarks.bottlenecks`."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import torch

from benchmarks.bottlenecks.cases import CASES, PAIRS, WITHOUT_CONTROL, Case
from benchmarks.bottlenecks.matrix import Row, load, matrix, rounded, save
from fusedops.profiling.run import profile

RECORDED = Path(__file__).parents[2] / "tests" / "profiling" / "recorded"
ALL = CASES | PAIRS
HEADER = """# Injected bottlenecks, and what fusedops.profile says

Each case is a step with a known bottleneck, and its control is the same step without it
(`benchmarks/bottlenecks/cases.py`). Every row was profiled with five seeds, each in a process of
its own, while other programs used the machine. `make profile-matrix` measures again and writes
this page; the tests judge the evidence that was recorded.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks")
    add = parser.add_argument
    add("cases", nargs="*", default=[], help="names; all without one")
    add("--seeds", type=int, default=5)
    add("--out", default=str(RECORDED), help="folder for the evidence of each case")
    add("--markdown", help="write the matrix there")
    add("--only-judge", action="store_true", help="do not measure: judge what was recorded")
    add("--worker", nargs=2, metavar=("SEED", "CONTROL"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.cases) - set(ALL):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    args.cases = args.cases or list(ALL)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        print(json.dumps(measure(ALL[args.cases[0]], int(args.worker[0]), args.worker[1] == "1")))
        return 0
    for name in [] if args.only_judge else args.cases:
        save(Path(args.out), name, list(rows(name, args.seeds)))
    results = load(Path(args.out))
    text, right = matrix(results, ALL)
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(f"{HEADER}\n{text}\n")
    return 0 if right else 1


def rows(name: str, seeds: int):
    """The evidence of a case and of its control, each seed in a process of its own."""
    for control in (False, True):
        if control and name in WITHOUT_CONTROL:
            continue
        for seed in range(seeds):
            command = [sys.executable, "-m", "benchmarks.bottlenecks", name]
            run = subprocess.run(
                [*command, "--worker", str(seed), str(int(control))],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            yield Row(seed, control, json.loads(run.stdout.splitlines()[-1]))
            print(f"{name}, seed {seed}{', control' if control else ''}", file=sys.stderr)


def measure(case: Case, seed: int, control: bool) -> dict:
    torch.manual_seed(seed)
    subject = case.make(Random(seed), control)
    try:
        report = profile(subject.step, data=subject.data, steps=15, budget_s=20, **subject.options)
    finally:
        subject.end()
    print(report, file=sys.stderr)
    return rounded(report.evidence.to_dict())


if __name__ == "__main__":
    sys.exit(main())
