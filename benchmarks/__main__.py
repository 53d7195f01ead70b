"""The benchmarks' command line: `python -m benchmarks norm` times the norm operators.

On a CPU, each allocator setting gets a fresh process: memory that one setting leaves in the heap
would change the other's times.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import FAMILIES, ON_GPU, WORKLOADS
from benchmarks.figures import campaign
from benchmarks.figures.results import RESULTS
from benchmarks.harness import cuda, goals, gpu, report, worker

MATCH = "only the rows whose title contains this"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    suites = parser.add_subparsers(dest="suite", required=True)
    for name in (*FAMILIES, "launch", "must-show", *WORKLOADS):
        _cpu_options(suites.add_parser(name, help="on a CPU"), name)
    _gpu_options(suites.add_parser("gpu", help="families on a GPU"))
    _figures_options(suites.add_parser("figures", help="write the figures of README and docs"))
    _campaign_options(suites.add_parser("campaign", help="measure all CPU results again"))
    args = parser.parse_args(argv)
    if args.suite in ("gpu", "figures", "campaign"):
        return args
    args.seconds = args.seconds or (0.2 if args.quick else 2.0)
    args.compile = args.compile and not args.quick
    args.allocator = args.allocator or (
        "default" if args.suite in ("launch", *WORKLOADS) and args.suite != "step" else "both"
    )
    return args


def _cpu_options(parser: argparse.ArgumentParser, suite: str) -> None:
    add = parser.add_argument
    add("--threads", type=int, default=1)
    add("--json", help="file for the rows")
    add("--allocator", choices=("default", "keep", "both"), help="keep: fusedops.keep_freed_memory")
    add("--seconds", type=float, help="seconds per row (default 2; 0.2 with --quick)")
    add("--quick", action="store_true", help="few shapes, little time, no torch.compile")
    add("--no-compile", dest="compile", action="store_false", help="skip torch.compile")
    if suite not in WORKLOADS:
        add("--match", default="", help=MATCH)
    if suite in ("must-show", "launch"):
        add("--family", action="append", choices=FAMILIES, help="one family; may be repeated")
    parser.set_defaults(family=[])
    add("--worker", action="store_true", help=argparse.SUPPRESS)


def _figures_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")


def _campaign_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("jobs", nargs="*", metavar="job", help="default: all")
    add("--out", help="folder for the results (default benchmarks/results/<this CPU>)")
    add("--again", action="store_true", help="measure what is current as well")
    add("--list", action="store_true", help="print what would be measured, why, and how long")


def _gpu_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("families", nargs="*", default=list(ON_GPU), metavar="family", help="default: all")
    add("--out", default=str(RESULTS), help="folder for <device>/<family>.json")
    add("--seconds", type=float, default=0.5, help="seconds per row (default %(default)g)")
    add("--match", default="", help=MATCH)
    add("--no-compile", dest="compile", action="store_false", help="skip torch.compile")
    add("--process-s", type=float, default=1800, help="seconds for one family")
    add("--worker", action="store_true", help=argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status: 1 if a kernel was wrong or a goal was missed."""
    args = parse(argv)
    if args.suite == "figures":
        from benchmarks.figures import command  # needs jinja2 and matplotlib

        return command.run(check=args.check)
    if args.suite == "campaign":
        return campaign.run(args)
    if args.suite == "gpu":
        cuda.require()
        if args.worker:
            return gpu.measure_family(args, args.families[0], cuda.machine())
        return gpu.measure(args, gpu.in_a_process)
    if args.worker:
        return worker.measure(args)
    return _both_settings(args, sys.argv[1:] if argv is None else argv)


def _both_settings(args: argparse.Namespace, argv: list[str]) -> int:
    settings = ("default", "keep") if args.allocator == "both" else (args.allocator,)
    runs = [_run(argv, setting) for setting in settings]
    document = {"environment": runs[0][1]["environment"]}
    document |= {key: [entry for _, run in runs for entry in run[key]] for key in ("rows", "goals")}
    document |= {key: run[key] for _, run in runs for key in run if key not in document}
    if args.suite not in WORKLOADS and not document["rows"]:
        raise SystemExit(f"no row of {args.suite} has {args.match!r} in its title")
    if document["goals"]:
        print(goals.table(document["goals"]))
    if args.json:
        Path(args.json).write_text(report.dump(document))
    missed = any(not goal["met"] for goal in document["goals"])
    return int(missed or any(status for status, _ in runs))


def _run(argv: list[str], allocator: str) -> tuple[int, dict]:
    """One setting's exit status and rows, from a fresh process that prints them as they come."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks", *argv, "--worker"]
        command += ["--allocator", allocator, "--json", str(path)]
        run = subprocess.run(command, check=False)
        if not path.exists():
            raise SystemExit(run.returncode)
        return run.returncode, json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
