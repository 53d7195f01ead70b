"""Renders docs/sweep_models.md from the results of the benchmarks `sweep` and `sweep-memory`."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures.results import RESULTS, FigureError, Result, find
from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.sweeping.row import SweepRow

__all__ = ["LIMIT", "PAGE", "STEM", "memory", "page"]

PAGE = "docs/sweep_models.md"
STEM = "sweep"
LIMIT = 2**30  # bytes of a step
HEADER = """# Training steps of four models, patched and unpatched

`python -m benchmarks sweep` writes this page, with [`fusedops.sweep`](guides/sweep.md). The models
have random weights from configs, about 20 million parameters and {words} words; a step is
`zero_grad`, forward, backward and torch's AdamW on sequences of {length} tokens. "times as fast" is
the median of paired ratios, patched over eager, with its 95 % interval.
"""


def memory(results: Path = RESULTS) -> Result | None:
    """The result with the points that a sweep skipped; None if there is none."""
    try:
        return find("sweep-memory", results)[0]
    except FigureError:
        return None


def page(result: Result, skipped: Result | None) -> str:
    """The page, from the files of results."""
    return "\n".join([*_lines(result), *(_skipped(skipped) if skipped else ())]) + "\n"


def _where(result: Result) -> Iterator[str]:
    yield f"{result.machine}, {result.date}, commit `{result.commit}`.\n"
    for goal in result.document["goals"]:
        met = "met" if goal["met"] else "missed"
        yield f"- {goal['title']}: {goal['measured']:.2f}, asked {goal['asked']:.2f}, {met}"


def _lines(result: Result) -> Iterator[str]:
    document = result.document
    settings = document["settings"]
    yield HEADER.format(words=settings["words"], length=settings["length"])
    yield from _where(result)
    for name, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in document["rows"]):
        same = [r for r in document["rows"] if (r["model"], r["dtype"]) == (name, dtype)]
        yield f"\n## {name}, {dtype}\n"
        yield f"![Latency against throughput, {name}, {dtype}](images/sweep-{name}-{dtype}.svg)\n"
        yield "| batch | eager | patched | times as fast | tokens/s, patched | peak, patched |"
        yield "| --: | --: | --: | --: | --: | --: |"
        yield from _table([SweepRow.from_dict(row) for row in same])


def _skipped(result: Result) -> Iterator[str]:
    yield "\n## Points that do not fit\n"
    yield "`python -m benchmarks sweep-memory` sweeps the float32 models within a limit of"
    yield f"{bytes_text(LIMIT)}. Each point that it skips then runs in a process of its own.\n"
    yield from _where(result)
    yield "\n| model | variant | batch | predicted peak | measured | error |"
    yield "| --- | --- | --: | --: | --: | --: |"
    for row in result.document["rows"]:
        sizes = [row["predicted_bytes"], row["peak_bytes"]]
        texts = " | ".join(map(bytes_text, sizes))
        point = f"{row['model']} | {row['variant']} | {row['batch']}"
        yield f"| {point} | {texts} | {sizes[0] / sizes[1] - 1:+.1%} |"


def _table(rows: list[SweepRow]) -> Iterator[str]:
    for batch in dict.fromkeys(row.batch for row in rows):
        eager, patched = (row for row in rows if row.batch == batch)
        if eager.p50 is None or patched.p50 is None:
            yield f"| {batch} | {eager.skipped_reason or patched.skipped_reason} | | | | |"
            continue
        times = f"{seconds_text(eager.p50)} | {seconds_text(patched.p50)} | {patched.ratio}"
        noisy = " (noisy)" if eager.noisy or patched.noisy else ""
        peak = bytes_text(patched.peak_bytes or 0)
        yield f"| {batch} | {times}{noisy} | {patched.tokens_per_s:,.0f} | {peak} |"
