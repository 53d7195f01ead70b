"""Compares small operator calls' times in two checkouts: `python -m checks builds OTHER`.

OTHER is a built checkout, such as a worktree of an earlier commit. Processes of the two trees
alternate, family by family, because a machine's speed changes within minutes. Each row compares the
fastest process of each tree; below 1, this tree is faster. It uses the fastest because other
programs only add time, and because a row can be 1.4 times slower in a process of either tree,
depending on memory placement. eager's rows show how much two runs of the same code differ.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import report, suites
from fusedops.measuring.environment import environment

ROOT = Path(__file__).parents[1]
OURS, THEIRS = "fusedops", "eager"  # prefix of our contenders' names
Row = tuple[str, str, str, tuple[int, ...]]  # contender, operation, mode, shape


def times(tree: Path, family: str, seconds: float, match: str) -> dict[str, dict[Row, float]]:
    """Times a family's rows in one process. Returns seconds per row: fusedops' and eager's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks", "launch", "--no-compile"]
        command += [f"--family={family}", f"--match={match}"]
        command += [f"--seconds={seconds}", f"--json={path}"]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=False)
        if not path.exists():
            print(f"{tree} timed no row of {family}", file=sys.stderr)
            return defaultdict(dict)
        rows = json.loads(path.read_text())["rows"]
    seconds_by_row: dict[str, dict[Row, float]] = defaultdict(dict)
    for row in rows:
        key = row["contender"], row["operation"], row["mode"], tuple(row["shape"])
        if row["status"] == "timed":
            seconds_by_row[key[0].partition(" ")[0]][key] = row["median_s"]
    return seconds_by_row


def families(match: str) -> list[str]:
    """Returns the families that have a row whose title contains `match`."""
    return [
        family
        for family in suites.FAMILIES
        if any(match in case.title for case in suites.launch(False, [family]))
    ]


def ratios(pairs: Iterable[tuple[dict[Row, float], dict[Row, float]]]) -> dict[Row, float]:
    """For each row in both trees: this tree's fastest time divided by the other's."""
    best: tuple[dict[Row, float], dict[Row, float]] = ({}, {})
    for pair in pairs:
        for fastest, times in zip(best, pair, strict=True):
            fastest |= {row: min(time, fastest.get(row, time)) for row, time in times.items()}
    before, after = best
    return {row: after[row] / before[row] for row in before.keys() & after.keys()}


def summary(of: dict[Row, float]) -> dict[str, Any]:
    """Returns the geometric mean, and the rows that are more than 5 % slower."""
    mean = math.exp(sum(map(math.log, of.values())) / max(len(of), 1))
    slower = sorted(((ratio, row) for row, ratio in of.items() if ratio > 1.05), reverse=True)
    return {
        "rows": len(of),
        "geometric_mean": round(mean, 4),
        "slower": [{"row": title(row), "ratio": round(ratio, 3)} for ratio, row in slower],
    }


def title(row: Row) -> str:
    contender, operation, mode, shape = row
    return f"{contender}: {operation} {mode} {[*shape]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("other", type=Path, help="a built checkout to compare with")
    add(
        "--rounds",
        type=int,
        default=4,
        help="processes per tree and family (default %(default)d)",
    )
    add("--seconds", type=float, default=0.3, help="seconds per row (default %(default)g)")
    add("--match", default="", help="only the rows whose title contains this")
    add("--json", type=Path, help="file for the results")


def run(args: argparse.Namespace) -> int:
    """Prints both summaries, and fusedops' rows that are more than 5 % slower.

    The exit status is 1 if there is such a row, or if the mean is more than 2 % worse.
    """
    names = families(args.match)
    if not names:
        raise SystemExit(f"no row has {args.match!r} in its title")
    trees, rounds = (args.other.resolve(), ROOT), []
    for family, turn in product(names, range(args.rounds)):
        order = trees if turn % 2 == 0 else trees[::-1]
        measured = {tree: times(tree, family, args.seconds, args.match) for tree in order}
        rounds.append([measured[tree] for tree in trees])
    summaries = {
        name: summary(ratios((before[name], after[name]) for before, after in rounds))
        for name in (OURS, THEIRS)
    }
    git = ["git", "-C", str(args.other), "rev-parse", "--short=12", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    about = environment(1, torch.device("cpu")) | {"before": before, "rounds": args.rounds}
    document = {"environment": about} | summaries
    for name, of in summaries.items():
        print(f"{name}: {of['geometric_mean']} over {of['rows']} rows, {len(of['slower'])} slower")
    if args.json:
        args.json.write_text(report.dump(document))
    slower = summaries[OURS]["slower"]
    for row in slower:
        print(f"  {row['ratio']} {row['row']}")
    return int(bool(slower) or summaries[OURS]["geometric_mean"] > 1.02)
