"""Measures the profiler's advice on four training loops and writes docs/profile_workloads.md."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.bottlenecks.workloads import WORKLOADS
from benchmarks.bottlenecks.workloads.measure import measure
from benchmarks.bottlenecks.workloads.page import page, reports
from benchmarks.harness import report

ROOT = Path(__file__).parents[3]
JSON = "docs/profile_workloads.json"
PAGE = "docs/profile_workloads.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.workloads")
    add = parser.add_argument
    add("--budget", type=float, default=60.0, help="seconds to compare a change")
    add("--only-write", action="store_true", help="do not measure: write the page of the JSON")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--worker", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.set_defaults(json=str(ROOT / JSON))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        print(json.dumps(measure(args.worker, WORKLOADS[args.worker](), args.budget)))
        return
    if not args.only_write:
        report.save(args, [_apart(name, args) for name in WORKLOADS], [])
    document = json.loads(Path(args.json).read_text())
    (ROOT / PAGE).write_text(page(document, JSON, reports(document)))


def _apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A workload's row, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bottlenecks.workloads", "--worker", name]
    command += ["--threads", str(args.threads), "--budget", str(args.budget)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
