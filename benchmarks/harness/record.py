"""Writes the result file of one operator family on one GPU.

A later run of the same build adds rows to the file.
"""

import json
from itertools import groupby
from pathlib import Path

from benchmarks.harness import report
from benchmarks.harness.case import Case
from benchmarks.harness.goals import GpuGoal
from benchmarks.harness.run import Result

# Two runs must share these for their rows to be in one file, unless one command started both.
SAME = ("device", "commit", "torch", "triton", "kernels")

TIMED_BY = {
    "device": "The device's time with a cold L2. Its ceiling is the copy.",
    "graph": "The device's time in a replayed graph. No percentage: the cache is warm, so memory "
    "bandwidth is not its limit.",
    "host": "The host's time to enqueue a call. No percentage: it has no ceiling.",
}


class Record:
    """Rows and goals by title: an earlier run's, until this run measures them again."""

    def __init__(
        self,
        path: Path,
        cases: list[Case],
        asked: list[GpuGoal],
        run: dict,
        again: bool = False,
    ) -> None:
        """`cases` and `asked` are all of the family's; `run` says where and when.

        again: `has` ignores rows that another command measured.
        """
        self.path, self.family, self.cases = path, path.stem, cases
        self.asked = {ask.case.title: ask for ask in asked}
        self.rows: dict[str, list[dict]] = {case.title: [] for case in cases}
        self.goals = {title: ask.verdicts(Result(ask.case, 0)) for title, ask in self.asked.items()}
        self.date, self.runs = run["environment"]["date"], [run]
        if path.exists():
            self._keep(json.loads(path.read_text()), run)
        counted = (r for r in self.runs if not again or _together(r, run))
        self.dates = {r["environment"]["date"] for r in counted}

    def add(self, result: Result, allocator: str) -> list[dict]:
        """Writes the file with one more row. Returns its entry."""
        title, top = result.case.title, self.runs[-1]["ceilings"]["copy"]["gb_per_s"]
        self.rows[title] = [
            row | {"run": self.date} for row in report.rows(result, allocator, ceiling=top)
        ]
        if title in self.asked:
            self.goals[title] = self.asked[title].verdicts(result)
        self._write()
        return self.rows[title]

    def has(self, case: Case) -> bool:
        """Whether the file has each of the row's contenders, or why it was not timed."""
        rows = (row for row in self.rows[case.title] if row["run"] in self.dates)
        return case.contenders().keys() <= {row["contender"] for row in rows}

    def _keep(self, earlier: dict, run: dict) -> None:
        last = earlier["runs"][-1]
        if not _together(last, run) and not same_build(last["environment"], run["environment"]):
            print(f"{self.path}: from another build or device; starting over", flush=True)
            return
        self.runs = [*earlier["runs"], run]
        for mine, theirs in ((self.rows, earlier["rows"]), (self.goals, earlier["goals"])):
            for title, rows in groupby(theirs, lambda row: row["title"]):
                mine[title] = list(rows)

    def _write(self) -> None:
        """Replaces the file atomically: an interrupted run leaves the old file."""
        new = self.path.with_suffix(".new")
        new.write_text(report.dump(self._document()))
        new.replace(self.path)

    def _document(self) -> dict:
        rows = [row for found in self.rows.values() for row in found]
        dates = {row["run"] for row in rows}
        return {
            "complete": all(self.has(case) for case in self.cases),
            "timed_by": TIMED_BY,
            **report.stamp(),
            "runs": [run for run in self.runs if run["environment"]["date"] in dates],
            "rows": rows,
            "goals": [verdict for found in self.goals.values() for verdict in found],
        }


def _together(one: dict, other: dict) -> bool:
    """Whether one command started both runs."""
    return one.get("started") is not None and one.get("started") == other.get("started")


def same_build(here: dict, there: dict) -> bool:
    """Whether two environments have the same build. A modified tree never matches."""
    commit = here["commit"]
    known = commit is not None and not commit.endswith("-dirty")
    return known and all(here.get(key) == there.get(key) for key in SAME)
