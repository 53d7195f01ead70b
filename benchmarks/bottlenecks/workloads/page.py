"""Renders the page on the four profiled training loops from recorded results."""

import textwrap
from collections.abc import Iterator
from statistics import median
from typing import Any

from fusedops.measuring.units import count_text
from fusedops.profiling.advice.advice import Advice
from fusedops.profiling.report import Profile
from fusedops.profiling.show.numbers import share_text
from fusedops.profiling.show.text import NAMES, predicted_text, saving_text

__all__ = ["page", "reports"]

HEADER = """# Four real training loops, before and after the report's first advice

Each loop was profiled by `fusedops.profile`. Then the first advice that can be applied here was
applied: blocks of steps with it and without it alternated, and intervals are 95 %. The verdict and
the shares are judged again from the recorded evidence when this page is written.
`make profile-workloads` measures again and writes this page from
`{json}`.
The code is in `benchmarks/bottlenecks/workloads/`.
"""
MACHINE = """\
Machine: {device}, {threads}, torch {torch}, transformers {transformers}. The load average was
{low:.1f} to {high:.1f} on {cpus:g} CPUs. Time in which other programs had the CPU is left out of
every saving but that of num_workers, since a worker is such a program. A step's time at the top of
a report contains it."""
WIDTH = 100
OF_INPUT = ("collate", "workers")  # save a part of the whole step; others run on kept batches


def reports(document: dict[str, Any]) -> dict[str, Profile]:
    """Workload -> its report, judged again from the evidence."""
    return {row["title"]: Profile.from_dict(row["report"]) for row in document["rows"]}


def page(document: dict[str, Any], json: str, profiles: dict[str, Profile]) -> str:
    """The page in Markdown. json: the document's file. profiles: its `reports`."""
    parts = [_header(document, json), *_summary(document, profiles)]
    for row in document["rows"]:
        parts += ["", *_workload(row, profiles[row["title"]])]
    return "\n".join(parts) + "\n"


def _header(document: dict[str, Any], json: str) -> str:
    rows = document["rows"]
    loads = [load for row in rows for load in row["load"]]
    about = rows[0]["environment"]
    machine = MACHINE.format(
        device=about["device"],
        threads=count_text(about["threads"], "thread"),
        torch=about["torch"],
        transformers=about["transformers"],
        low=min(loads),
        high=max(loads),
        cpus=rows[0]["report"]["evidence"]["cpus"],
    )
    return f"{HEADER.format(json=json)}\n{_filled(machine)}\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _summary(document: dict[str, Any], profiles: dict[str, Profile]) -> Iterator[str]:
    yield "| workload | limited by | unexplained | first advice | predicted | measured |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in document["rows"]:
        report = profiles[row["title"]]
        first = _first(row, report)
        named = _named(report)
        unexplained = share_text(report.verdict.shares["unknown"][1])
        cells = [row["title"], named, unexplained, first.title, *_savings(first)]
        yield f"| {' | '.join(cells)} |"


def _named(report: Profile) -> str:
    shares = report.verdict.shares
    if report.verdict.bounds == ("unknown",):
        return "no single bound"
    return ", ".join(f"{NAMES[b]} {share_text(shares[b][1])}" for b in report.verdict.bounds)


def _savings(advice: Advice) -> tuple[str, str]:
    predicted = predicted_text(advice)
    return predicted, saving_text(advice.measured) if advice.measured else "not measured"


def _first(row: dict[str, Any], report: Profile) -> Advice:
    """The first advice that was tried."""
    return next(advice for advice in report.advice if advice.id == row["tried"][0])


def _workload(row: dict[str, Any], report: Profile) -> Iterator[str]:
    yield f"## {row['title'].capitalize()}"
    yield ""
    yield _filled(row["about"])
    yield ""
    yield _filled(" ".join(_meaning(row, report)))
    yield ""
    yield "```"
    yield str(report)
    yield "```"


def _meaning(row: dict[str, Any], report: Profile) -> Iterator[str]:
    """What it means: a sentence on the verdict, and one on each change that was tried."""
    if report.verdict.bounds == ("unknown",):
        yield "No single resource limits a step."
    else:
        yield f"What limits a step: {_named(report)} of its time."
    advice = {item.id: item for item in report.advice}
    passed = [advice[i].title for i in row["order"][: row["order"].index(row["tried"][0])]]
    if passed:
        yield f"Not applied, since it needs other code: {', '.join(passed)}."
    for number, name in enumerate(row["tried"]):
        kind = "The first advice" if number == 0 else "Also tried"
        yield f"{kind}, {advice[name].title}: {_gain(report, advice[name])}."


def _gain(report: Profile, advice: Advice) -> str:
    saved = advice.measured
    if saved is None or saved.seconds is None or saved.interval is None:
        return "it could not be measured in the time there was"
    low, high = saved.interval
    if low <= 0 <= high:
        kind = "no difference can be seen"
    else:
        base = median((report.evidence.cached or report.evidence.plain).running)
        base = median(report.evidence.plain.running) if advice.id in OF_INPUT else base
        change = "less" if low > 0 else "more"
        kind = f"a step takes {share_text(abs(saved.seconds) / base)} {change} time"
    predicted = advice.predicted
    if predicted is None or predicted.seconds is None:
        return f"{kind} ({saving_text(saved)}; nothing was predicted)"
    return f"{kind} ({saving_text(saved)}; predicted was {saving_text(predicted)})"
