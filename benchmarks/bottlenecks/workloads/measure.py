"""Profiles a training loop and measures the savings of some advised changes."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.bottlenecks.matrix import rounded
from benchmarks.bottlenecks.workloads.workload import Block, Workload
from fusedops.measuring.alternate import Rounds, alternate
from fusedops.measuring.environment import environment
from fusedops.profiling.advice.advice import Saving, saving
from fusedops.profiling.report import Profile
from fusedops.profiling.run import profile

__all__ = ["measure"]

PROFILE_S = 55.0
FEWEST, MOST = 8, 40  # pairs of blocks
ALWAYS = ("patch",)  # is tried wherever it is advised


def measure(name: str, workload: Workload, budget_s: float) -> dict[str, Any]:
    """A row: the report with what was measured, and what else ran. budget_s: of each change."""
    before = os.getloadavg()
    report = profile(
        workload.step,
        data=workload.data,
        model=workload.model,
        optimizer=workload.optimizer,
        budget_s=PROFILE_S,
    )
    order = [one.id for one in report.advice]
    tried = list(_to_try(report, workload))
    savings = {}
    for one in tried:
        if one in workload.changes:
            savings[one] = asdict(compare(*workload.changes[one](), budget_s))
        else:
            report.measure(one, budget_s=budget_s)
    values = report.to_dict()
    for one in values["advice"]:
        one["measured"] = savings.get(one["id"], one["measured"])
    return {
        "title": name,
        "about": workload.about,
        "environment": environment(torch.get_num_threads(), torch.device("cpu")),
        "load": [before[0], os.getloadavg()[0]],
        "order": order,
        "tried": tried,
        "report": rounded(values),
    }


def _to_try(report: Profile, workload: Workload) -> Iterator[str]:
    """The first advice that can be applied; then the workload's own changes, and `ALWAYS`."""
    measurable, first = report.measurable, True
    for one in report.advice:
        own = one.id in workload.changes
        if own or one.id in measurable:
            if own or first or one.id in ALWAYS:
                yield one.id
            first = False


def compare(without: Block, changed: Block, budget_s: float) -> Saving:
    """What a change saves of a step: blocks in turn, ABBA, until the budget ends."""
    blocks = without, changed
    for block in blocks:
        block()
    seconds: tuple[list[float], list[float]] = [], []
    for _, i in alternate((0, 1), Rounds(FEWEST, MOST, budget_s)):
        seconds[i].append(blocks[i]())
    return saving(*seconds)
