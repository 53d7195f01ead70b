"""Times one benchmark suite under one setting of the memory allocator."""

import importlib
import multiprocessing
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks import WORKLOADS
from benchmarks.harness import report, suites
from benchmarks.harness.memory import Memory
from benchmarks.harness.run import COPY, Result, measure_memory, run_case
from benchmarks.harness.timing import CPU
from fusedops.allocator import keep_freed_memory


def measure(args: Namespace) -> int:
    """Prints each row when it is measured, writes `args.json`; returns 1 if a kernel is wrong."""
    torch.set_num_threads(args.threads)
    if args.allocator == "keep":
        keep_freed_memory()
    if args.suite in WORKLOADS:
        return importlib.import_module(WORKLOADS[args.suite]).measure(args)
    results: list[Result] = []
    weighed = suites.weighed() if args.allocator == "default" else []
    for case in suites.cases(args):
        results.append(run_case(case, args.seconds, CPU, copy=args.suite != "launch"))
        if case in weighed:
            _weigh(results[-1], args.threads)
        print(report.text(report.rows(results[-1], args.allocator)), flush=True)
    rows = [row for result in results for row in report.rows(result, args.allocator)]
    report.save(args, rows, _verdicts(args, results))
    return int(any(result.wrong() for result in results))


def _weigh(result: Result, threads: int) -> None:
    """Measures each contender's memory during its first call, in its own process.

    It skips torch.compile, which would compile during that call.
    """
    spawn = multiprocessing.get_context("spawn")
    for name in result.seconds:
        if name != COPY and not name.startswith("compile"):
            with ProcessPoolExecutor(1, spawn) as child:
                memory = child.submit(_weigh_here, result.case.title, name, threads).result()
            result.memory |= {} if memory is None else {name: memory}


def _weigh_here(title: str, name: str, threads: int) -> Memory | None:
    torch.set_num_threads(threads)
    case = next(case for case in suites.weighed() if case.title == title)
    return measure_memory(case, name, CPU)


def _verdicts(args: Namespace, results: list[Result]) -> list[dict]:
    goals = suites.goals(args.allocator, args.family) if args.suite == "must-show" else []
    pairs = ((goal, r) for goal in goals for r in results if r.case == goal.case())
    return [verdict for goal, r in pairs for verdict in goal.verdicts(r, args.allocator)]
