"""Times operator families on a GPU: `python -m benchmarks gpu norm --out DIR`.

Three passes go over all families: their first rows, their other rows, then the rows' torch.compile
contenders, which take long to start. So a run that is cut short has the rows that matter most. In
each pass a family has a process of its own: an illegal access ends only that.

A file is rewritten after each row. A later run of the same build measures what the file lacks.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.harness import goals as asked
from benchmarks.harness import report, suites
from benchmarks.harness.case import Case
from benchmarks.harness.goals import OURS, GpuGoal
from benchmarks.harness.record import Record
from benchmarks.harness.roofline import ceilings, keep_busy
from benchmarks.harness.run import Result, count_launches, measure_memory, run_case
from benchmarks.harness.timing import Machine
from fusedops.measuring.environment import environment, slug

FIRST, OTHERS, COMPILED = PASSES = ("first", "others", "compiled")
# The families whose kernels are least certain; the others follow.
DOUBTFUL = ("attention", "adamw", "quantized_linear", "cross_entropy")
WORST = 5  # missed goals that the summary shows

Process = Callable[[Namespace, str, str], int]  # (args, family, pass) -> exit status


def measure(args: Namespace, process: Process) -> int:
    """Runs every pass of `args.families`. Returns 1 if a kernel was wrong or a goal was missed."""
    for name in args.families:
        matching(name, args.match)
    status = 0
    for part in args.passes or PASSES:
        for name in by_doubt(args.families):
            if rows_of(name, part, args.match):
                status |= _ended(name, process(args, name, part))
    found = [*_documents(Path(args.out), args.families)]
    print(summary(found), flush=True)
    return status | int(any(asked.missed(document["goals"]) for document in found))


def by_doubt(families: Iterable[str]) -> list[str]:
    rank = {name: place for place, name in enumerate(DOUBTFUL)}
    return sorted(families, key=lambda name: rank.get(name, len(rank)))


def _ended(name: str, status: int) -> int:
    """Reports a process that did not end by itself; its rows are in the family's file."""
    if status in (0, 1):
        return status
    print(f"{name}: its process ended with status {status}; what it measured is kept", flush=True)
    return 1


def in_a_process(args: Namespace, name: str, part: str) -> int:
    """Measures a family's pass in a process of its own, which has `args.process_s` seconds."""
    command = [sys.executable, "-m", "benchmarks", "gpu", name, "--out", args.out, "--pass", part]
    command.append("--worker")
    command += ["--match", args.match, "--seconds", str(args.seconds), "--started", args.started]
    command += ["--again"] * args.again
    try:
        return subprocess.run(command, timeout=args.process_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: more than {args.process_s:.0f} s", flush=True)
        return 1


def matching(name: str, match: str) -> list[Case]:
    """Returns the family's rows whose title contains `match`, the most important ones first."""
    module = suites.family(name)
    ordered = {case.title: case for case in [*module.GPU_FIRST, *module.GPU_ROWS]}
    cases = [case for title, case in ordered.items() if match in title]
    if not cases:
        raise SystemExit(f"no row of {name} has {match!r} in its title")
    return cases


def rows_of(name: str, part: str, match: str = "") -> list[Case]:
    """Returns a pass's rows of a family, with the contenders that the pass times."""
    every, first = matching(name, match), {case.title for case in suites.family(name).GPU_FIRST}
    plain = {case.title: suites.without_compile(case) for case in every}
    if part == COMPILED:
        return [case for case in every if case.contenders() != plain[case.title].contenders()]
    return [case for title, case in plain.items() if (title in first) == (part == FIRST)]


def measure_family(args: Namespace, name: str, part: str, machine: Machine) -> int:
    """One family's pass, in this process. Returns 1 if a kernel was wrong or the device is lost."""
    run: dict = {"match": args.match, "pass": part, "started": args.started}
    run["ceilings"] = _ceilings(Path(args.out, "ceilings.json"), args.started, machine)
    keep_busy(machine, run["ceilings"])  # record the clocks under load
    run["environment"] = environment(torch.get_num_threads(), machine.device)
    folder = Path(args.out, slug(run["environment"]["device"]))
    folder.mkdir(parents=True, exist_ok=True)
    module = suites.family(name)
    path, goals = folder / f"{name}.json", module.GPU_MUST_SHOW
    record = Record(path, module.GPU_ROWS, goals, run, args.again)
    todo = [case for case in rows_of(name, part, args.match) if not record.has(case)]
    marker = folder / f"{name}.running"
    results = [*_timed(record, _in_order(todo, marker), marker, args.seconds, machine)]
    if not machine.lost():
        _count(record, results, goals, machine)
    print(report.reasons(results), flush=True)
    return int(bool(machine.lost()) or any(result.wrong() for result in results))


def _ceilings(path: Path, started: str, machine: Machine) -> dict:
    """The machine's limits, which the first of a run's processes measures."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("started") != started:
        known = {"started": started, "ceilings": ceilings(machine)}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(known, indent=1))
        new.replace(path)  # atomically: every later process reads it
        print(path.read_text(), flush=True)
    return known["ceilings"]


def _in_order(cases: list[Case], marker: Path) -> list[Case]:
    """A row that ended an earlier process comes last."""
    fatal = marker.read_text() if marker.exists() else None
    return sorted(cases, key=lambda case: case.title == fatal)


def _timed(
    record: Record, cases: Iterable[Case], marker: Path, budget_s: float, machine: Machine
) -> Iterator[Result]:
    for case in cases:
        marker.write_text(case.title)
        result = run_case(case, budget_s, machine, copy=case.clock == "device")
        print(report.text(record.add(result, "torch's")), flush=True)
        marker.unlink()
        yield result
        if why := machine.lost():
            print(f"{record.family}: the device is lost after {case.title}: {why}", flush=True)
            return


def _count(
    record: Record, results: Sequence[Result], goals: Sequence[GpuGoal], machine: Machine
) -> None:
    """Adds launches and memory, for calls with goals for these.

    It comes after all timing of this process: a profiler may slow down every later launch.
    """
    goal_of = {ask.case.title: ask for ask in goals}
    for result in results:
        ask = goal_of.get(result.case.title)
        if ask is None or (ask.launches is None and ask.beside is None):
            continue
        if ask.launches is not None:
            found = count_launches(result.case, machine)
            result.launches = {name: n for name, n in found.items() if name in result.seconds}
        if ask.beside is not None and OURS in result.seconds:
            memory = measure_memory(ask.case, OURS, machine)
            result.memory = {OURS: memory} if memory else {}
        record.add(result, "torch's")
        if machine.lost():
            return


def _documents(out: Path, families: Iterable[str]) -> Iterator[dict]:
    for name in families:
        for path in sorted(out.glob(f"*/{name}.json")):
            yield json.loads(path.read_text()) | {"family": name}


def summary(documents: Sequence[dict]) -> str:
    """How many goals were met, by family, and the goals that were missed by most."""
    lines, missed = [], list[dict]()
    for document in documents:
        goals = document["goals"]
        timed = [goal for goal in goals if goal["measured"] is not None]
        met = sum(goal["met"] is True for goal in goals)
        absent = sum(goal["met"] is None for goal in goals)
        whole = "whole" if document["complete"] else "not whole"
        text = f"{met} of {len(timed)} measured goals met, of {len(goals)}"
        lines.append(f"{document['family']}: {text}; {absent} rivals not installed; {whole}")
        missed += asked.missed(timed)
    worst = sorted(missed, key=asked.shortfall)[:WORST]
    return "\n".join([*lines, *([asked.table(worst)] if worst else [])])
