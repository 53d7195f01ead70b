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


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.workloads")
    add = parser.add_argument
    add("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all without one")
    add("--json", default=str(ROOT / JSON), help="rows of workloads that are not named stay")
    add("--markdown", default=str(ROOT / PAGE), help="the page")
    add("--budget", type=float, default=60.0, help="seconds to compare a change")
    add("--only-write", action="store_true", help="do not measure: write the page of the JSON")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    args.workloads = args.workloads or list(WORKLOADS)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.worker:
        (name,) = args.workloads
        print(json.dumps(measure(name, WORKLOADS[name](), args.budget)))
        return 0
    if not args.only_write:
        rows = _kept(Path(args.json)) | {name: _apart(name, args) for name in args.workloads}
        report.save(args, [rows[name] for name in WORKLOADS if name in rows], [])
    document = json.loads(Path(args.json).read_text())
    Path(args.markdown).write_text(page(document, JSON, reports(document)))
    return 0


def _kept(path: Path) -> dict[str, Any]:
    """The rows of an earlier run."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["title"]: row for row in rows}


def _apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A workload's row, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bottlenecks.workloads", name, "--worker"]
    command += ["--threads", str(args.threads), "--budget", str(args.budget)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
