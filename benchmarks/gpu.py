"""Times families on a GPU: `python -m benchmarks gpu norm --out DIR` writes DIR/<device>/norm.json.

The file is written anew after each row, so that a run that is cut short keeps what it measured.
"""

import json
from argparse import Namespace
from pathlib import Path

import torch

from benchmarks import must_show, report, suites
from benchmarks.case import Case
from benchmarks.ceilings import ceilings
from benchmarks.harness import Result, count_launches, run_case
from benchmarks.must_show import Ask
from benchmarks.timing import Machine
from fusedops.measure import environment, slug


def measure(args: Namespace, machine: Machine) -> int:
    """1 when a kernel of ours was wrong or a goal was missed, in any of `args.families`."""
    about = {"ceilings": ceilings(machine)}  # first: the clocks are read under load
    about = {"environment": environment(torch.get_num_threads(), machine.device)} | about
    about["match"] = args.match
    print(json.dumps(about, indent=1), flush=True)
    return max([_family(name, args, machine, about) for name in args.families])


def _family(name: str, args: Namespace, machine: Machine, about: dict) -> int:
    path = Path(args.out, slug(about["environment"]["device"]), f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    cases, asked = _rows(name, args.match)
    results: list[Result] = []
    for case in cases:
        results.append(run_case(case, args.seconds, machine, copy=case.clock == "device"))
        print(report.text(results[-1], "torch's"), flush=True)
        _write(path, about, results, asked)
    counted = [ask.case for ask in asked if ask.launches]
    for result in results:
        if result.case in counted:
            count_launches(result, machine)
    verdicts = _write(path, about, results, asked)
    print(report.reasons(results))
    print(must_show.table(verdicts))
    missed = any(not verdict["met"] for verdict in verdicts)
    return int(missed or any(result.wrong() for result in results))


def _rows(name: str, match: str) -> tuple[list[Case], list[Ask]]:
    """The family's rows whose title contains `match`, and what is asked of them."""
    module = suites.family(name)
    cases = [case for case in module.GPU_ROWS if match in case.title]
    if not cases:
        raise SystemExit(f"no row of {name} has {match!r} in its title")
    return cases, [ask for ask in module.GPU_MUST_SHOW if ask.case in cases]


def _write(path: Path, about: dict, results: list[Result], asked: list[Ask]) -> list[dict]:
    """The document of all that was measured so far; its verdicts."""
    verdicts = [verdict for ask in asked for verdict in ask.verdicts(results)]
    top = about["ceilings"]["copy"]["gb_per_s"]
    rows = []
    for result in results:
        ceiling = None if result.case.clock == "host" else top
        rows += report.rows(result, "torch's", ceiling)
    path.write_text(report.dump(about | {"rows": rows, "goals": verdicts}))
    return verdicts
