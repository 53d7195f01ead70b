"""Times a family on a GPU: `python -m benchmarks gpu norm --out DIR`.

The file is rewritten after each row, so that an interrupted run keeps its measurements. A later run
of the same build adds to it: a family may be measured in parts, with `--match`.
"""

import json
import multiprocessing
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness import cuda, report, suites
from benchmarks.harness import goals as asked
from benchmarks.harness.case import Case
from benchmarks.harness.goals import OURS
from benchmarks.harness.memory import Memory
from benchmarks.harness.record import Record
from benchmarks.harness.roofline import ceilings, keep_busy
from benchmarks.harness.run import Result, count_launches, measure_memory, run_case
from benchmarks.harness.timing import Machine
from fusedops.profiling.timing import environment, slug


class Counted(NamedTuple):
    """Launches and memory, measured apart from times: per title, by contender."""

    launches: dict[str, dict[str, int]]
    memory: dict[str, dict[str, Memory]]


def measure(args: Namespace, machine: Machine) -> int:
    """Returns 1 if a kernel was wrong or a goal was missed in any of `args.families`."""
    cases = {name: matching(name, args.match) for name in args.families}
    counted = count_apart(args.families, args.match)
    run = {"match": args.match, "ceilings": ceilings(machine)}
    keep_busy(machine, run["ceilings"])  # record the clocks under load
    run["environment"] = environment(torch.get_num_threads(), machine.device)
    print(json.dumps(run, indent=1), flush=True)
    folder = Path(args.out, slug(run["environment"]["device"]))
    folder.mkdir(parents=True, exist_ok=True)
    status = 0
    for name, rows in cases.items():
        module = suites.family(name)
        record = Record(folder / f"{name}.json", module.GPU_ROWS, module.GPU_MUST_SHOW, run)
        status |= _family(record, rows, counted, args.seconds, machine)
    return status


def matching(name: str, match: str) -> list[Case]:
    """Returns the family's rows whose title contains `match`."""
    cases = [case for case in suites.family(name).GPU_ROWS if match in case.title]
    if not cases:
        raise SystemExit(f"no row of {name} has {match!r} in its title")
    return cases


def count_apart(families: list[str], match: str) -> Counted:
    """`count` in its own process, before timing, so that an interrupted run has counted."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_count_here, families, match).result()


def count(families: list[str], match: str, machine: Machine) -> Counted:
    """Counts launches and measures memory, for the calls that have goals for these."""
    every = [ask for name in families for ask in suites.family(name).GPU_MUST_SHOW]
    asked = [ask for ask in every if match in ask.case.title]
    launching = [ask.case for ask in asked if ask.launches is not None]
    weighed = {
        a.case.title: measure_memory(a.case, OURS, machine) for a in asked if a.beside is not None
    }
    return Counted(
        {case.title: count_launches(case, machine) for case in launching},
        {title: {OURS: memory} for title, memory in weighed.items() if memory},
    )


def _count_here(families: list[str], match: str) -> Counted:
    return count(families, match, cuda.machine())


def _family(
    record: Record, cases: list[Case], counted: Counted, budget_s: float, machine: Machine
) -> int:
    results: list[Result] = []
    for case in cases:
        result = run_case(case, budget_s, machine, copy=case.clock == "device")
        launches, memory = (of.get(case.title, {}) for of in counted)
        result.launches = {name: n for name, n in launches.items() if name in result.seconds}
        result.memory = {name: m for name, m in memory.items() if name in result.seconds}
        results.append(result)
        print(report.text(record.add(result, "torch's")), flush=True)
    goals = [goal for case in cases for goal in record.goals.get(case.title, [])]
    print(report.reasons(results))
    print(asked.table(goals))
    missed = any(not goal["met"] for goal in goals)
    return int(missed or any(result.wrong() for result in results))
