"""Tabulates the profiler's expected and actual verdicts, and saves and loads recorded profiles."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bottlenecks.cases import Case
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import judge

__all__ = ["Row", "load", "matrix", "right", "rounded", "save"]

DIAGONAL = 0.95  # of the runs must be named right
DIGITS = 4  # significant ones, in recorded numbers


@dataclass(frozen=True)
class Row:
    """One profile. evidence: `Evidence.to_dict`."""

    seed: int
    control: bool
    evidence: dict[str, Any]


def save(folder: Path, name: str, rows: list[Row]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(vars(row), separators=(",", ":")) for row in rows]
    (folder / f"{name.replace(' ', '_')}.jsonl").write_text("\n".join(lines) + "\n")


def load(folder: Path) -> dict[str, list[Row]]:
    """Case -> its rows, of all files in a folder."""
    return {
        path.stem.replace("_", " "): [Row(**json.loads(line)) for line in path.open()]
        for path in sorted(folder.glob("*.jsonl"))
    }


def rounded(value: Any) -> Any:
    """The same value with floats of a few digits, so that files stay small."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def right(case: Case, row: Row) -> tuple[bool, tuple[str, ...]]:
    """Whether a verdict is what the case asks for, and the verdict."""
    bounds = judge(Evidence.from_dict(row.evidence)).bounds
    if row.control:
        return not set(case.lost) & set(bounds), bounds
    return set(bounds) == set(case.bounds), bounds


def matrix(results: Mapping[str, list[Row]], cases: Mapping[str, Case]) -> tuple[str, bool]:
    """A table in Markdown, and whether enough is right. Controls must all be."""
    lines = ["| case | asked | verdicts | right |", "| --- | --- | --- | --- |"]
    counts: Counter[str] = Counter()
    for name, control, rows in _groups(results):
        case = cases[name]
        judged = [right(case, row) for row in rows]
        good = sum(ok for ok, _ in judged)
        kind = "control" if control else "pair" if len(case.bounds) > 1 else "case"
        counts[f"{kind} right"] += good
        counts[kind] += len(rows)
        asked = f"not {' or '.join(case.lost)}" if control else " and ".join(case.bounds)
        verdicts = Counter(" and ".join(bounds) for _, bounds in judged)
        shown = ", ".join(f"{verdict} {n}" for verdict, n in verdicts.most_common())
        label = f"{name}, control" if control else name
        lines.append(f"| {label} | {asked} | {shown} | {good} of {len(rows)} |")
    kinds = [kind for kind in ("case", "pair", "control") if counts[kind]]
    totals = [f"{kind}s: {counts[f'{kind} right']} of {counts[kind]}" for kind in kinds]
    lines += ["", f"{', '.join(totals)} right."]
    enough = counts["case right"] >= DIAGONAL * counts["case"]
    return "\n".join(lines), enough and all(
        counts[f"{kind} right"] == counts[kind] for kind in ("pair", "control")
    )


def _groups(results: Mapping[str, list[Row]]) -> Iterator[tuple[str, bool, list[Row]]]:
    for name, rows in results.items():
        for control in (False, True):
            if chosen := [row for row in rows if row.control == control]:
                yield name, control, chosen
