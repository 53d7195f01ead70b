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
    order = [advice.id for advice in report.advice]
    tried = list(_to_try(report, workload))
    savings = {}
    for advice in tried:
        if advice in workload.changes:
            savings[advice] = asdict(compare(*workload.changes[advice](), budget_s))
        else:
            report.measure(advice, budget_s=budget_s)
    values = report.to_dict()
    for advice in values["advice"]:
        advice["measured"] = savings.get(advice["id"], advice["measured"])
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
    for advice in report.advice:
        has_change = advice.id in workload.changes
        if has_change or advice.id in measurable:
            if has_change or first or advice.id in ALWAYS:
                yield advice.id
            first = False


def compare(without: Block, changed: Block, budget_s: float) -> Saving:
    """What a change saves per step, from blocks with and without it, ABBA, within the budget."""
    blocks = without, changed
    for block in blocks:
        block()
    seconds: tuple[list[float], list[float]] = [], []
    for _, i in alternate((0, 1), Rounds(FEWEST, MOST, budget_s)):
        seconds[i].append(blocks[i]())
    return saving(*seconds)
